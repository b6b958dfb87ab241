"""Running any transformers model whose layers mix tokens by operations that Etude answers.

They are attention, through transformers' AttentionInterface, and the operations in `recurrences`. The products of
`experts` are Etude's too. The rest is the model's own code. `verification` checks each model once, when it is created.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from etude.errors import ConfigError
from etude.models.backbone import AttentionFn, Backbone
from etude.models.checkpointing import checkpoint_layer
from etude.models.compiled_layers import CompiledLayers, choose_forward
from etude.models.config import ActivationCheckpointing
from etude.models.experts import use_own_experts
from etude.models.lora_layers import make_adapters_switchable
from etude.models.mixers import current_layer, current_mixer, use_mixer
from etude.models.prepack import LinearWeight
from etude.models.recurrences import route
from etude.models.routes import Routes, current_routes, use_routes
from etude.models.shapes import read_text_config

ATTENTION_NAME = "etude"
"""The name of Etude's attention among transformers' implementations."""

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "mlp", "moe"}
_REASONS = {
    "indexed_attention": ", which chooses the keys of each token",
    "chunked_attention": ", whose result depends on the place of a token in its pass",
}
"""The reasons why a kind of layer is not supported."""
_LENGTH_DEPENDENT = {"dynamic", "longrope"}
_checkpointing: ContextVar[ActivationCheckpointing] = ContextVar("checkpointing", default="none")


class TransformersBackbone(Backbone):
    """A transformers model, called once for a flat list of tokens, always in evaluation mode.

    transformers checkpoints activations only in training mode, which also enables dropout and router noise. So this
    class checkpoints the layers: it replaces the `forward` of each layer object.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module: Any = module
        self.compiled: CompiledLayers | None = None
        """Its layers as torch.compile makes them, after `compile_layers`."""
        for index, layer in enumerate(decoder_layers(module, module.config.get_text_config().num_hidden_layers)):
            layer.etude_index = index  # type: ignore[assignment]
            layer.forward = MethodType(_layer_forward, layer)
        route(module)
        use_own_experts(module)
        make_adapters_switchable(module)

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: AttentionFn, checkpointing: ActivationCheckpointing
    ) -> Tensor:
        with (
            use_checkpointing(checkpointing),
            use_mixer(attend),
            nullcontext() if self.compiled is None else self.compiled.active(),
        ):
            out = self.module.base_model(input_ids=ids[None].long(), position_ids=positions[None], use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def linear_weights(self) -> list[LinearWeight]:
        """See `Backbone`: there are none, because the model's modules multiply by themselves."""
        return []

    def compile(self) -> None:
        """See `Backbone`: refused, because the steps are the model's own code."""
        raise ConfigError(
            f"On the engine `local`, `train.compile` compiles the steps of the Llama, Mistral, Qwen2 and Qwen3 "
            f"families. This is a {_model_type(self.module)} model, which runs transformers' own code. Set "
            "`train.engine=fsdp`, which compiles whole layers of any family, also on one rank; or leave "
            "`train.compile` out."
        )

    def compile_layers(self) -> None:
        """Compile whole layers but for their attention, for the passes that follow."""
        self.compiled = CompiledLayers(self.module.device)


@contextmanager
def use_checkpointing(kind: ActivationCheckpointing) -> Iterator[None]:
    """Let the decoder layers of passes in this context keep for their backward pass what `kind` says."""
    token = _checkpointing.set(kind)
    try:
        yield
    finally:
        _checkpointing.reset(token)


def _layer_forward(layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a decoder layer's forward pass; with checkpointing, the backward pass runs it again."""
    forward, index = choose_forward(layer, hidden_states), cast("int", layer.etude_index)

    def compute(*inputs: Any, **more: Any) -> Any:
        token = current_layer.set(index)
        try:
            return forward(layer, *inputs, **more)
        finally:
            current_layer.reset(token)

    run = checkpoint_layer(compute, _checkpointing.get(), _recompute_contexts)
    return run(hidden_states, *args, **kwargs)


def _recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpointed layer's first and second forward pass.

    The second runs in the backward pass, after the call of the model has ended.
    """
    mixer = current_mixer.get()
    routes = current_routes()
    return _use_pass(mixer, routes), _use_pass(mixer, routes)


@contextmanager
def _use_pass(mixer: AttentionFn | None, routes: Routes | None) -> Iterator[None]:
    with use_mixer(mixer), use_routes(routes):
        yield


def _attention_interface(
    module: Any,
    query: Tensor,  # [1, Hq, P, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Answer transformers' attention call with the mixer of the current forward pass."""
    unknown = [f"`{name}`" for name, x in more.items() if isinstance(x, Tensor) and name not in _IGNORED_ARGUMENTS]
    unknown += ["bidirectional attention"] if more.get("is_causal") is False else []
    if unknown:
        raise ConfigError(
            f"Layer {current_layer.get()} ({type(module).__name__}) attends with {unknown[0]}, which Etude's attention "
            f"does not know. Choose a model with plain causal attention."
        )
    windows = {sliding_window} if attention_mask is None else {sliding_window, int(attention_mask) or None}
    window = max((size for size in windows if size is not None), default=None)
    width = max(query.shape[-1], value.shape[-1])
    attend = current_mixer.get()
    assert attend is not None, "attention of Etude runs in a pass of Etude"
    out = attend(
        current_layer.get(),
        _flat_heads(query, width),
        _flat_heads(key, width),
        _flat_heads(value, width),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None, ..., : value.shape[-1]], None


def _flat_heads(x: Tensor, width: int) -> Tensor:
    """[1, H, P, D] → [P, H, width]: heads that are narrower end in zeros, which add nothing to a score or a sum."""
    heads = x[0].transpose(0, 1)
    return heads if x.shape[-1] == width else pad(heads, (0, width - x.shape[-1]))


_IGNORED_ARGUMENTS = {"position_ids", "cache_position"}


def _window_as_mask(*, local_size: int | None = None, **_: object) -> Tensor:
    """Return the window in place of a mask, 0 for no window. No mask is ever built."""
    return torch.full((1, 1, 1, 1), local_size or 0)


def register_attention() -> None:
    """Register Etude's attention with transformers, so that models can be created with it.

    In a compiled layer it runs uncompiled.
    """
    uncompiled = torch.compiler.disable(_attention_interface)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION_NAME, uncompiled)
    AttentionMaskInterface.register(ATTENTION_NAME, _window_as_mask)


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Refuse a configuration that Etude cannot run, before any weight is read."""
    text = read_text_config(config)
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in _SUPPORTED_LAYER_TYPES:
            raise ConfigError(
                f"Layer {index} of this {config.model_type} model is `{kind}`{_REASONS.get(kind, '')}. Etude does not "
                f"compute it. Choose a model whose layers are among {', '.join(sorted(_SUPPORTED_LAYER_TYPES))}."
            )
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in [ropes, *(nested for nested in ropes.values() if isinstance(nested, dict))]:
        if rope.get("rope_type") in _LENGTH_DEPENDENT:
            raise ConfigError(
                f"This {config.model_type} model has `{rope['rope_type']}` rotary positions. They change with the "
                f"longest sequence of a pass, so a row's result would depend on the other rows. "
                f"Set another `rope_type` in its config.json, such as `yarn`, or choose another model."
            )


def decoder_layers(module: PreTrainedModel, count: int) -> list[nn.Module]:
    """Return the list of layers: the first module list of that length within the text part.

    The vision tower of a vision-language model may have as many layers.
    """
    candidates = [
        part for part in text_part(module).modules() if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if not candidates:
        raise ConfigError(f"The {count} layers of this {_model_type(module)} model were not found among its modules.")
    return list(candidates[0])


def text_part(module: Any) -> nn.Module:
    """Return the part of a model that has its embedding and its decoder layers, without a tower for images."""
    part: nn.Module = module.get_decoder()
    return part


def _model_type(module: PreTrainedModel) -> str:
    return str(module.config.model_type)
