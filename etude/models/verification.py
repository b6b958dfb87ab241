"""The check that Etude computes a model as transformers does. Each model with transformers' own layers is checked once.

A small tree of rows is computed twice: by Etude, packed, and by transformers, each row alone. Every layer gets the same
inputs both times. So a layer that differs is found by its index, and a difference does not grow from layer to layer.

    prompt ──┬── answer 1      the rows of transformers: prompt and answer 1, prompt and answer 2, another row
             └── answer 2
    another row

What so short a tree cannot show, `refuse_unsupported` refuses by the kind of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from etude.batch import Pack, PackImages
from etude.errors import ConfigError
from etude.models.attention import PackedAttention
from etude.models.experts import use_family_experts
from etude.models.mixers import AloneMixer, use_mixer
from etude.models.shapes import AttentionShape, LayerSizes
from etude.models.transformers_backbone import decoder_layers
from etude.models.vision import (
    PassImages,
    attention_names,
    axes_positions,
    place_features,
    small_pixels,
    tower_arguments,
)
from etude.models.whole_images import split_images

if TYPE_CHECKING:
    from etude.models.model import Model

SEGMENT = 5
"""The number of tokens of each of the tree's four segments."""
TREE_ROWS = ((0, 1), (0, 2), (3,))
"""The rows of the tree, as segments."""
SPARE_TOKENS = 4
"""The tokens of 20 that may differ in half precision, where rounding may send a token to another expert."""
_COARSE = (torch.bfloat16, torch.float16)


@torch.no_grad()
def verify_model(model: Model, ranks: int = 1) -> None:
    """Refuse a model in which tokens affect each other by an operation that Etude does not know, or whose packed rows
    are not those of transformers. Record the sizes of what its layers keep.

    ranks: the number of ranks whose tokens the layers gather; positions are those of all of them. transformers' rows
    are compared for one rank only.
    """
    layers = decoder_layers(model.module, model.num_layers)
    called = _verify_alone(model, layers, ranks)
    if ranks > 1:  # each rank has some of the heads
        return
    _verify_tree(model, layers)
    if model.has_vision and not isinstance(model.head_weight, FakeTensor):  # whose places of images are not known
        _verify_image(model, layers)
    model.sizes = LayerSizes(
        attention=tuple(
            _choose_shape(said, called.attention.get(layer)) for layer, said in enumerate(model.sizes.attention)
        ),
        states=tuple(called.states.get(layer) for layer in range(model.num_layers)),
    )


def _choose_shape(said: AttentionShape | None, called: AttentionShape | None) -> AttentionShape | None:
    """Return the shape of a layer's heads as its config says, unless the layer attends with others."""
    if said is None or called is None:
        return called
    same = (said.query_heads, said.key_heads, said.width) == (called.query_heads, called.key_heads, called.width)
    return said if same else called


def _verify_alone(model: Model, layers: list[nn.Module], ranks: int) -> AloneMixer:
    """Run four tokens that see only themselves, and refuse a model in which they affect each other.

    Return what the layers asked.
    """
    module, alone = model.module, AloneMixer()
    ids = torch.tensor([0, 1, 2, 1], device=model.device) % model.vocab_size
    positions = torch.zeros(4 * ranks, dtype=torch.int64, device=model.device)
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(_record_outputs(outputs)) for layer in layers]
    with _described_failure(module, layers, outputs):
        try:
            hidden = model.hidden(ids, positions, alone)
            with use_mixer(AloneMixer()):
                logits = _reference_logits(model, ids, positions)
        finally:
            for hook in hooks:
                hook.remove()
    repeated = next((call for call in alone.calls if alone.calls.count(call) > 1), None)
    if repeated is not None:
        operation, index = repeated
        raise ConfigError(
            f"{_layer_label(layers, index)} of this {_model_type(module)} model has {alone.calls.count(repeated)} "
            f"calls of {operation}, and Etude keeps one for each layer. Choose another model."
        )
    for index, output in enumerate(outputs[: model.num_layers]):
        if not _is_close(output[1], output[3]):
            raise ConfigError(
                f"{_layer_label(layers, index)} of this {_model_type(module)} model mixes tokens by an operation "
                f"that Etude does not know. It knows attention, short convolutions, gated delta rules and Mamba2. "
                f"Choose another model."
            )
    if not alone.attention:
        raise ConfigError(
            f"This {_model_type(module)} model has no layer that attends through transformers' AttentionInterface, and "
            f"Etude's engine keeps requests by their keys. Choose a model that attends, such as a hybrid one."
        )
    if not _is_close(logits, model.logits(hidden)):
        raise ConfigError(
            f"This {_model_type(module)} model computes its logits in a way that Etude does not support, so its "
            f"log-probs would be wrong. Choose another model."
        )
    return alone


def _verify_tree(model: Model, layers: list[nn.Module]) -> None:
    """Refuse a model with a layer whose packed rows differ from those of transformers."""
    pack, theirs = _tree_pack(model), _LayerValues()
    with _described_failure(model.module, layers, theirs.outputs):
        for row in TREE_ROWS:
            tokens = torch.cat([torch.arange(SEGMENT) + SEGMENT * segment for segment in row]).to(model.device)
            with theirs.recorded(layers, tokens), _own_code(model.module):
                model.module.base_model(
                    input_ids=pack.ids[tokens][None].long(), position_ids=pack.positions[tokens][None], use_cache=False
                )
        ours = _LayerValues()
        with theirs.given(layers), ours.recorded(layers, torch.arange(len(pack.ids), device=model.device)):
            model.hidden(pack.ids, pack.positions, PackedAttention(pack))
    for index in range(len(layers)):
        share = _find_difference(ours.outputs[index], theirs.outputs[index], theirs.inputs[index])
        if share is not None:
            raise ConfigError(
                f"{_layer_label(layers, index)} of this {_model_type(model.module)} model computes packed rows "
                f"otherwise than rows alone ({share:.0%} off), so Etude would train another model. Choose another "
                f"model."
            )


def _verify_image(model: Model, layers: list[nn.Module]) -> None:
    """Refuse a model whose tokens take an image's features otherwise than in transformers."""
    module, config = model.module, model.module.config
    pixels = small_pixels(config, rows=2, columns=3)
    image = np.repeat([-1, 0, -1], [3, pixels.features, 3])
    feature = np.arange(len(image)) - 3
    ids = torch.where(torch.from_numpy(image < 0), torch.arange(len(image)) % 3, config.image_token_id)
    inputs = {"input_ids": ids[None], **tower_arguments(config, [pixels], model.device)}
    if pixels.grid is not None or model.image_attention != "causal":
        kinds = "token_type_ids" if model.image_attention == "both ways" else "mm_token_type_ids"
        inputs[kinds] = torch.from_numpy(image >= 0).long()[None]
    plain = np.arange(len(image))
    places = plain if pixels.grid is None else axes_positions(image, feature, [pixels.grid])
    taken = [torch.from_numpy(each).to(model.device) for each in place_features(image, feature, [pixels.features])]
    row = Pack(
        ids=ids.int().to(model.device),
        positions=torch.from_numpy(plain).to(model.device),
        offsets=torch.tensor([0, len(ids)]),
        parent=torch.tensor([-1]),
        source=torch.arange(-1, len(ids) - 1),
        images=PackImages(torch.from_numpy(image), torch.from_numpy(feature), ()),
    )
    row = split_images(row, model.image_attention)
    with _described_failure(module, layers, []):
        images = PassImages(model.encode_images([pixels]), *taken)
        ours = model.hidden(row.ids, torch.from_numpy(places).to(model.device), PackedAttention(row), images)
        with _own_code(module):
            moved = {name: tensor.to(model.device) for name, tensor in inputs.items()}
            theirs = module.base_model(**moved, use_cache=False).last_hidden_state[0]
    if not _is_close(ours, theirs):
        raise ConfigError(
            f"This {_model_type(module)} model puts images among its tokens in a way that Etude does not know, so its "
            f"log-probs would be wrong. Choose another model."
        )


def _tree_pack(model: Model) -> Pack:
    """Return a prompt with two answers, and another row."""
    generator = torch.Generator().manual_seed(0)
    count, device = 4 * SEGMENT, model.device
    own = torch.arange(SEGMENT)
    return Pack(
        ids=torch.randint(0, model.vocab_size, (count,), generator=generator, dtype=torch.int32).to(device),
        positions=torch.cat([own, own + SEGMENT, own + SEGMENT, own]).to(device),
        offsets=torch.arange(0, count + 1, SEGMENT),
        parent=torch.tensor([-1, 0, 0, -1]),
        source=torch.arange(-1, count - 1),
    )


class _LayerValues:
    """The inputs and outputs of all layers for the tokens of the tree."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    @contextmanager
    def recorded(self, layers: list[nn.Module], tokens: Tensor) -> Iterator[None]:
        """Record what the layers get and give in this context, for these tokens."""

        def record(index: int) -> Callable[..., None]:
            def hook(_layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                values = (args[0] if args else kwargs["hidden_states"])[0], _first(output)[0]
                for kept, value in zip((self.inputs, self.outputs), values, strict=True):
                    if len(kept) == index:
                        kept.append(value.new_zeros(4 * SEGMENT, *value.shape[1:]))
                    kept[index][tokens] = value

            return hook

        with ExitStack() as hooks:
            for index, layer in enumerate(layers):
                hooks.callback(layer.register_forward_hook(record(index), with_kwargs=True).remove)
            yield

    @contextmanager
    def given(self, layers: list[nn.Module]) -> Iterator[None]:
        """Give the layers the recorded inputs in this context."""

        def give(index: int) -> Callable[..., Any]:
            def hook(_layer: nn.Module, args: Any, kwargs: Any) -> Any:
                given = self.inputs[index][None]
                return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})

            return hook

        with ExitStack() as hooks:
            for index, layer in enumerate(layers):
                hooks.callback(layer.register_forward_pre_hook(give(index), with_kwargs=True).remove)
            yield


def _find_difference(ours: Tensor, theirs: Tensor, inputs: Tensor) -> float | None:
    """Return how much of the layer's step is different, or None if it is no more than rounding gives."""
    coarse, wide = inputs.dtype in _COARSE, torch.promote_types(inputs.dtype, torch.float32)
    off = (ours.to(wide) - theirs.to(wide)).norm(dim=1)
    step = (theirs.to(wide) - inputs.to(wide)).norm(dim=1)
    rounding = 2 * torch.finfo(inputs.dtype).eps * theirs.to(wide).norm(dim=1)  # hidden states may be large
    excess = off - rounding - (0.05 if coarse else 1e-3) * step
    excess = excess.nan_to_num(nan=torch.inf)  # no number where transformers has one
    excess = torch.where(theirs.isfinite().all(dim=1), excess, 0).sort().values
    if not bool((excess[: len(excess) - (SPARE_TOKENS if coarse else 0)] > 0).any()):
        return None
    return float(off.norm() / step.norm().clamp(min=torch.finfo(off.dtype).tiny))


@contextmanager
def _own_code(module: Any) -> Iterator[None]:
    """Let transformers attend and multiply experts by its own code in this context."""
    module.set_attn_implementation("eager")
    try:
        with use_family_experts(module):
            yield
    finally:
        module.set_attn_implementation(attention_names(module.config))


@contextmanager
def _described_failure(module: PreTrainedModel, layers: list[nn.Module], outputs: list[Tensor]) -> Iterator[None]:
    """Turn an error within the model into a sentence with its layer. outputs: of the layers that have succeeded."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        where = _layer_label(layers, min(len(outputs), len(layers) - 1))
        raise ConfigError(f"This {_model_type(module)} model cannot be run: {where} fails with: {error}") from error


def _reference_logits(model: Model, ids: Tensor, positions: Tensor) -> Tensor:
    """[N, V]: transformers' own logits of these tokens. A scoring model gives them only for its last token.

    So for a scoring model this function applies the head to all hidden states.
    """
    module = model.module
    inputs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}
    if model.has_score_head:
        scores: Tensor = module.score(module.base_model(**inputs).last_hidden_state)[0]
        return scores
    logits: Tensor = module(**inputs).logits[0]
    return logits


def _record_outputs(outputs: list[Tensor]) -> Callable[..., None]:
    def hook(_layer: nn.Module, _inputs: object, output: Any) -> None:
        outputs.append(_first(output).reshape(4, -1))

    return hook


def _first(output: Any) -> Tensor:
    """Return the hidden states among what a layer returns."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def _is_close(a: Tensor, b: Tensor) -> bool:
    coarse = a.dtype in _COARSE
    rtol, atol = (0.05, 0.05) if coarse else (1e-3, 1e-4)
    return torch.allclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True)


def _layer_label(layers: list[nn.Module], index: int) -> str:
    return f"Layer {index} ({type(layers[index]).__name__})"


def _model_type(module: PreTrainedModel) -> str:
    return str(module.config.model_type)
