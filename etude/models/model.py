"""A causal model over flat lists of tokens: no batch dimension, no padding, attention from the caller."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from etude.errors import ConfigError
from etude.images.pixels import Pixels
from etude.models.allocator import retain_memory
from etude.models.backbone import AttentionFn, Backbone
from etude.models.config import ActivationCheckpointing
from etude.models.float32_weights import find_float32_weights
from etude.models.fused_layers import FusedBackbone, supports_fused
from etude.models.lora_layers import adapted_layers, external_name, is_adapted, merge_adapter, without_adapters
from etude.models.part_patterns import matches_part, refuse_unmatched
from etude.models.prepack import LinearWeight, prepacked_linear
from etude.models.published_names import read_expert_name
from etude.models.routes import RouteShape, control_routers
from etude.models.shapes import AttentionShape, LayerSizes, attention_shapes, read_context_length
from etude.models.transformers_backbone import TransformersBackbone, decoder_layers, text_part
from etude.models.verification import verify_model
from etude.models.vision import Features, PassImages, VisionBackbone, image_attention, takes_images
from etude.models.vision_types import USED_FOR_TEXT, ImageAttention


class Model:
    """The weights of a transformers model, and their computation.

    `module` owns the weights. Its parameters are leaves with their published names, so that `torch.optim`,
    `state_dict`, `save_pretrained` and `named_parameters` work as usual.

    If `fused_layers` supports the architecture, the parameters of q, k and v are views of one storage, and so are those
    of gate and up. One matrix product computes them and one computes their gradients, which arrive in each parameter's
    own `.grad`. Write to parameters in place (`copy_`, an optimizer step, `load_state_dict`). To change dtype or
    device, take a `copy`: new memory for a parameter (`param.data = …`, `module.to(…)`) detaches it from the fused
    storage.

    Dropout never acts, not even in training: the trained probability must be the sampled one.

    A critic and a reward model are models too. Their head gives one number where a language model's gives a logit for
    each token id: transformers' sequence classification with one label, read at any token.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        float32_weights: Mapping[str, Tensor] | None = None,
        *,
        fused: bool = True,
        verify: bool = True,
    ) -> None:
        """float32_weights: the values before rounding to the module's dtype, for weights that rounding changed; see
        `take_float32_weights`. fused: use our own layers if the family has them. verify: run other layers once, to see
        that they compute as expected.
        """
        if module.device.type in ("cpu", "meta"):
            retain_memory()
        self.module: Any = module
        self._float32_weights: Mapping[str, Tensor] = float32_weights or {}
        self.module.eval()  # type: ignore[no-untyped-call]
        config = module.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.activation_checkpointing: ActivationCheckpointing = "none"
        """The activations of a layer that are computed again for its backward pass instead of stored."""
        self.has_score_head: bool = isinstance(getattr(module, "score", None), nn.Linear)
        """True if its head gives a number and not logits."""
        self._head: Any = self.module.score if self.has_score_head else self.module.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.logit_scale, self.logit_cap = (1.0, None) if self.has_score_head else _logit_scale_and_cap(config)
        self._backbone = _make_backbone(module, fused)
        self.sizes = LayerSizes(attention_shapes(config), (None,) * self.num_layers)
        """The sizes of its layers; those of states are known once it is verified."""
        if verify:
            self.verify()
        self.context_length = read_context_length(config)
        """The longest sequence that its positions support."""

    @property
    def head_weight(self) -> nn.Parameter:
        """[V, H]: the matrix that turns hidden states into logits; tied to the embedding in many models."""
        weight: nn.Parameter = self._head.weight
        return weight

    @property
    def head_bias(self) -> nn.Parameter | None:
        """[V]: the head's bias, in the few architectures that have one."""
        bias: nn.Parameter | None = self._head.bias
        return bias

    @property
    def vocab_size(self) -> int:
        """The number of its token ids: as many as the tokenizer has, or a little more."""
        return int((self.module.get_input_embeddings().weight if self.has_score_head else self.head_weight).shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in."""
        return self.head_weight.dtype

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self.head_weight.device

    @property
    def attention_shapes(self) -> tuple[AttentionShape | None, ...]:
        """The heads of each layer; None for a layer that does not attend."""
        return self.sizes.attention

    @property
    def heads(self) -> AttentionShape:
        """The heads of the first layer that attends, and of all in a family whose layers are alike."""
        return next(shape for shape in self.attention_shapes if shape is not None)

    @property
    def kv_values_per_token(self) -> int:
        """The count of numbers that the embedded engine keeps for a token: the keys and values of all layers."""
        return self.sizes.kv_values_per_token

    @property
    def state_bytes(self) -> int:
        """The bytes of the states of one sequence in all recurrent layers; known once the model is verified."""
        return self.sizes.state_bytes

    def with_sizes(self, sizes: LayerSizes) -> Model:
        """Return this model, with the same weights, as one whose layers have these sizes."""
        made = copy.copy(self)
        made.sizes = sizes
        return made

    def verify(self, ranks: int = 1) -> None:
        """Run a few tokens through layers that are not our own, and refuse a model that computes in another way.

        ranks: the number of ranks whose tokens the layers gather.
        """
        if isinstance(self._backbone, TransformersBackbone):
            verify_model(self, ranks)

    def hidden(self, ids: Tensor, positions: Tensor, attend: AttentionFn, images: PassImages | None = None) -> Tensor:
        """[P] int, [P] int64 → [P, H]: final normed hidden states of a flat list of tokens; differentiable.

        images: the features that some tokens take; only for a model that takes images. Some of these models place
        tokens in three axes, and then positions may be [3, P]; see `vision.axes_positions`.
        """
        if images is None:
            return self._backbone(ids, positions, attend, self._checkpointing)
        return self._vision(ids, positions, attend, self._checkpointing, images)

    def encode_images(self, pixels: Sequence[Pixels]) -> Features:
        """Compute the features of one or more images, end to end; differentiable."""
        return self._vision.encode(pixels, self._checkpointing)

    @property
    def has_vision(self) -> bool:
        """True if it takes images."""
        return isinstance(self._backbone, VisionBackbone)

    @property
    def image_attention(self) -> ImageAttention:
        """The way in which the tokens of an image attend to each other; see `whole_images`."""
        return image_attention(self.module.config) if self.has_vision else "causal"

    @property
    def reads_text_too(self) -> bool:
        """True if models of this type are used for text alone as well."""
        return self.module.config.model_type in USED_FOR_TEXT

    @property
    def tower_weights(self) -> dict[str, nn.Parameter]:
        """The weights that compute the features of images, by their published names; none in a model of text."""
        if not self.has_vision:
            return {}
        text = {id(weight) for weight in (*text_part(self.module).parameters(), *self._head.parameters())}
        return {name: weight for name, weight in self.named_weights() if id(weight) not in text}

    @property
    def frozen_tower(self) -> frozenset[str]:
        """The names of the weights that compute the features of images, if none of them is trained."""
        return frozenset() if self.trains_tower else frozenset(self.tower_weights)

    @property
    def trains_tower(self) -> bool:
        """True if weights that compute the features of images are trained, or adapters of them."""
        return any(weight.requires_grad for weight in self.tower_weights.values())

    @property
    def _vision(self) -> VisionBackbone:
        assert isinstance(self._backbone, VisionBackbone), "only a model that takes images gets some"
        return self._backbone

    @property
    def _checkpointing(self) -> ActivationCheckpointing:
        return self.activation_checkpointing if torch.is_grad_enabled() else "none"

    def logits(self, hidden: Tensor, words: Tensor | None = None) -> Tensor:
        """[N, H] → [N, V] in float32 or wider, scaled and capped as the architecture does.

        words: [W] ids; the logits are then those of these tokens alone, [N, W].
        """
        return self.scale_and_cap_logits(self.raw_logits(hidden, words))

    def raw_logits(self, hidden: Tensor, words: Tensor | None = None) -> Tensor:
        """[N, H] → [N, V] in float32 or wider: the product with the head, nothing more; see `_HeadLinear`."""
        weight, bias = self.head_weight, self.head_bias
        raw: Tensor = _HeadLinear.apply(
            hidden,
            weight if words is None else weight[words],
            bias if words is None or bias is None else bias[words],
        )  # type: ignore[no-untyped-call]
        return raw

    def scale_and_cap_logits(self, raw: Tensor) -> Tensor:
        """[N, V] → [N, V]: scaled and capped."""
        logits = raw if self.logit_scale == 1 else raw * self.logit_scale
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap

    def logits_backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient of the raw logits from that of the finished ones, which is overwritten."""
        if self.logit_cap is not None:
            grad = grad.mul_(1 - (logits / self.logit_cap).square())
        return grad if self.logit_scale == 1 else grad.mul_(self.logit_scale)

    def linear_weights(self) -> list[LinearWeight]:
        """Return the weights that a `PrepackedWeights` may hold a second time."""
        return [*self._backbone.linear_weights(), LinearWeight(self.head_weight, self.head_weight.requires_grad)]

    def compile(self) -> None:
        """Compile the trainer's small steps. An engine that shares the model still runs the handwritten ones."""
        self._backbone.compile()

    def compile_layers(self) -> None:
        """Compile whole layers, which must be transformers' own, for every pass of the model."""
        assert isinstance(self._backbone, TransformersBackbone), "our own layers have compiled steps instead"
        self._backbone.compile_layers()

    @property
    def compiled_graphs(self) -> int:
        """The number of graphs that `compile_layers` has led to so far."""
        compiled = self._backbone.compiled if isinstance(self._backbone, TransformersBackbone) else None
        return 0 if compiled is None else compiled.graphs

    @property
    def body(self) -> type[Backbone]:
        """The class that computes its layers: ours for this family, or the generic one."""
        return type(self._backbone)

    @property
    def own_layers(self) -> FusedBackbone | None:
        """Its layers, if they are those of `fused_layers`."""
        return self._backbone if isinstance(self._backbone, FusedBackbone) else None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter once."""
        yield from self.module.parameters()

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return every weight once, by its published name; a tied weight has its first name. Adapters are included."""
        return ((external_name(name), weight) for name, weight in self.module.named_parameters())

    def trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the weights that are trained: all, unless some are frozen or replaced by adapters."""
        return ((name, weight) for name, weight in self.named_weights() if weight.requires_grad)

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the adapters' weights, by peft's names without its prefix."""
        return {name: weight for name, weight in self.named_weights() if ".lora_" in name}

    @property
    def adapter_rank(self) -> int:
        """The rank (inner width) of the widest adapter; 0 without adapters."""
        return max((len(weight) for name, weight in self.named_weights() if ".lora_A." in name), default=0)

    @property
    def adapter_modules(self) -> tuple[str, ...]:
        """The last parts of the names of the layers with adapters."""
        adapted = (name.partition(".lora_A.")[0] for name, _ in self.named_weights() if ".lora_A." in name)
        return tuple(sorted({name.rpartition(".")[2] for name in adapted}))

    def merged_weights(self, weights: Iterable[tuple[str, Tensor]] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the equal model without adapters, one at a time; see `lora_layers.merge_adapter`.

        weights: all weights of the model, if its own are whole only while these are yielded.
        """
        adapted = {f"{name}.weight": layer for name, layer in adapted_layers(self.module)}
        for name, weight in self.named_weights() if weights is None else weights:
            if ".lora_" not in name:
                whole = weight.detach()
                yield name, merge_adapter(adapted[name], whole) if name in adapted else whole

    def untied_weights(self, weights: Iterable[tuple[str, Tensor]] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weights with a separate head: a head tied to the embedding is yielded as a copy.

        weights: the weights to use instead of `merged_weights`.
        """
        tied = self.module.config.tie_word_embeddings
        names = [name for name, weight in self.named_weights() if weight is self.module.get_input_embeddings().weight]
        for name, weight in self.merged_weights() if weights is None else weights:
            yield name, weight
            if tied and name in names:
                yield "lm_head.weight", weight.clone()

    @staticmethod
    def read_expert_name(name: str) -> tuple[str, int | None]:
        """Return the parameter and the expert that a name of weights that come one by one has; None for all of it."""
        return read_expert_name(name)

    def with_buffers(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield these weights, and then the buffers that the model's files hold besides, such as biases of routers."""
        yield from weights
        for name, buffer in stored_buffers(self.module).items():
            yield external_name(name), buffer.detach()

    def config_dict(self) -> dict[str, Any]:
        """Return the content of its `config.json`."""
        config: dict[str, Any] = self.module.config.to_dict()
        return config | {"architectures": [type(self.module).__name__]}

    @property
    def has_experts(self) -> bool:
        """True if it has a mixture of experts, whose weights are those of all experts together."""
        return any(weight.ndim == 3 and "experts" in name for name, weight in self.named_weights())

    def control_routers(self, option: str) -> RouteShape:
        """Let passes follow `use_routes`, and return the size of its choices; refuse a model that cannot.

        option: the option that needs it, which errors name.
        """
        config = self.module.config
        found = control_routers(decoder_layers(self.module, self.num_layers), config.get_text_config().hidden_size)
        if isinstance(found, str):
            raise ConfigError(
                f"`{option}` replays the experts that routers choose, and this {config.model_type} model {found}. "
                f"Leave it out, or choose another model."
            )
        return found

    @property
    def has_adapters(self) -> bool:
        """True if it has adapters."""
        return any(map(is_adapted, self.module.modules()))

    def without_adapters(self) -> AbstractContextManager[None]:
        """Compute with the base model only, on this thread, in a context without gradients."""
        return without_adapters()

    def freeze(self, parts: Sequence[str]) -> None:
        """Freeze these parts. Refuse a part that matches no weight, and a choice that leaves nothing to train."""
        weights = dict(self.named_weights())
        refuse_unmatched("model.freeze", parts, weights)
        for name, weight in weights.items():
            if any(matches_part(part, name) for part in parts):
                weight.requires_grad_(False)
        if not any(weight.requires_grad for weight in weights.values()):
            raise ConfigError(
                f"`model.freeze=[{','.join(parts)}]` leaves nothing of the model to train. Freeze less of it."
            )
        self._float32_weights = {
            name: exact for name, exact in self._float32_weights.items() if weights[name].requires_grad
        }

    def freeze_tower(self) -> None:
        """Freeze the weights that compute the features of images."""
        tower = self.tower_weights
        for weight in tower.values():
            weight.requires_grad_(False)
        self._float32_weights = {name: exact for name, exact in self._float32_weights.items() if name not in tower}

    def take_float32_weights(self) -> Mapping[str, Tensor]:
        """Return the float32 values of rounded weights, if it was loaded for training; the next call returns none."""
        taken = self._float32_weights
        self._float32_weights = {}
        return taken

    def copy(self, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None) -> Model:
        """Copy the model and its weights, to another dtype or device if given."""
        module = copy.deepcopy(self.module)
        cast(module, dtype or self.dtype, torch.device(device or self.device))
        made = Model(module, verify=False)
        made.sizes = self.sizes
        made.activation_checkpointing = self.activation_checkpointing
        return made


def _make_backbone(module: PreTrainedModel, fused: bool) -> Backbone:
    if fused and supports_fused(module):
        return FusedBackbone(module)
    has_score_head = isinstance(getattr(module, "score", None), nn.Linear)  # its images would be read by nothing
    if takes_images(module.config) and not has_score_head:
        return VisionBackbone(module)
    return TransformersBackbone(module)


def _logit_scale_and_cap(config: Any) -> tuple[float, float | None]:
    """Return an architecture's factor on its logits, and its cap on them if it has one."""
    scale = getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1.0)
    return scale, getattr(config, "final_logit_softcapping", None)


class _HeadLinear(torch.autograd.Function):
    """x · Wᵀ + b in float32 or wider.

    With half precision inputs, a GPU returns its sums in float32. No CPU kernel does this: there the sums are rounded
    to half precision once before they are widened, in the sampler and in the trainer. This rounding moves a logit in
    bfloat16 by at most 2⁻⁹ of itself, less than the rounding of the hidden states does. Without it, the gap between
    sampler and trainer would be about a tenth smaller, and this product four to eight times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16):
            out = torch.mm(x, weight.T, out_dtype=torch.float32)
            return out if bias is None else out.add_(bias)
        return prepacked_linear(x, weight, bias).to(torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        into_x, into_weight, into_bias = ctx.needs_input_grad
        grad = grads[0].to(x.dtype)
        return (
            grad @ weight if into_x else None,
            grad.T @ x if into_weight else None,
            grad.sum(0) if into_bias else None,
        )


def stored_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that weight files store."""
    stored = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def copy_stored_buffers(source: nn.Module, module: nn.Module) -> None:
    """Copy the buffers that weight files store into the same module."""
    with torch.no_grad():
        for name, buffer in stored_buffers(module).items():
            buffer.copy_(source.get_buffer(name))


def cast(module: Any, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Give the parameters another dtype, and a device if one is given; see `find_float32_weights` for those that stay
    in float32.

    Buffers keep their precision: rotary frequencies need it.
    """
    if device is not None:
        module.to(device)
    kept = {id(weight) for weight in find_float32_weights(module, dtype).values()}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in kept else dtype)
