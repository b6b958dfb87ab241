"""The layers of the Llama, Mistral, Qwen2 and Qwen3 families, written once for trainer and engine.

They compute the same as transformers' modules, with the modules' own parameters, in fewer and larger steps. q, k and v
are one matrix product, gate and up another. Norms, rotary positions and the gated activation are each one step forward
and one backward. If peft's layers wrap the modules, their adapters are part of the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from etude.models.backbone import AttentionFn, Backbone
from etude.models.checkpointing import checkpoint_layer
from etude.models.compiled_ops import compile_layer_ops
from etude.models.config import ActivationCheckpointing
from etude.models.layer_ops import EAGER_OPS, LayerOps
from etude.models.lora_layers import (
    FusedLora,
    adapted_linear,
    adapters_disabled,
    fuse_storage,
    get_base_layer,
    is_adapted,
)
from etude.models.prepack import LinearWeight, prepacked_linear
from etude.models.step_ops import StepOps

_TYPES = {"llama", "mistral", "qwen2", "qwen3"}


def supports_fused(module: PreTrainedModel) -> bool:
    """Return true if the layers of this module's family are written here."""
    config = module.config
    return config.model_type in _TYPES and config.hidden_act == "silu" and not getattr(config, "mlp_bias", False)


class FusedLinear:
    """Linear maps of the same input as one: their weights are views of one storage, and stay separate leaves."""

    def __init__(self, *parts: nn.Module) -> None:
        bases = [get_base_layer(part) for part in parts]
        self.parameters: list[Any] = [base.weight for base in bases]
        self.weight = fuse_storage(self.parameters)
        biases: list[Any] = [base.bias for base in bases]
        self.bias = None if biases[0] is None else fuse_storage(biases)
        self.parameters += [] if self.bias is None else biases
        self.low = FusedLora(parts) if any(map(is_adapted, parts)) else None

    def __call__(self, x: Tensor) -> Tensor:
        """[P, H] → [P, ΣO]: the outputs side by side."""
        first = self.parameters[0]
        assert first.data_ptr() == self.weight.data_ptr(), "a fused parameter was given other memory: see `Model`"
        low = None if self.low is None or adapters_disabled() else self.low
        if not torch.is_grad_enabled():
            out = prepacked_linear(x, self.weight, self.bias)
            if low is not None:
                low.add(out, x)
            return out
        if low is not None:
            return adapted_linear(x, self.weight, self.bias, low)
        fused: Tensor = _FusedLinear.apply(x, self.weight, self.bias, *self.parameters)  # type: ignore[no-untyped-call]
        return fused

    def linear_weights(self) -> list[LinearWeight]:
        """See `Backbone`."""
        return [LinearWeight(self.weight, any(parameter.requires_grad for parameter in self.parameters))]


class _FusedLinear(torch.autograd.Function):
    """One product forward, two backward; the parameters' gradients are views of one result.

    If some parameters are frozen, each of the others has a separate product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = [len(parameter) for parameter in parameters if parameter.ndim == 2]
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        into_x = grad @ weight if ctx.needs_input_grad[0] else None
        count, needed = len(ctx.sizes), ctx.needs_input_grad[3:]
        of_parts = torch.split(grad, ctx.sizes, 1)
        if all(needed[:count]):
            into: list[Tensor | None] = list(torch.split(grad.T @ x, ctx.sizes))
        else:
            into = [part.T @ x if wanted else None for part, wanted in zip(of_parts, needed, strict=False)]
        into += [part.sum(0) if wanted else None for part, wanted in zip(of_parts, needed[count:], strict=False)]
        return into_x, None, None, *into


class _Linear:
    """One linear map without fusion."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, x: Tensor) -> Tensor:
        return prepacked_linear(x, self.part.weight, self.part.bias)

    def linear_weights(self) -> list[LinearWeight]:
        """See `Backbone`."""
        return [LinearWeight(self.part.weight, self.part.weight.requires_grad)]


def _linear(part: nn.Module) -> FusedLinear | _Linear:
    """Return one linear map, with its adapter if it has one."""
    return FusedLinear(part) if is_adapted(part) else _Linear(part)


@dataclass(frozen=True)
class _Heads:
    """The sizes that all layers' attention shares."""

    query: int
    key: int
    width: int
    scale: float
    eps: float


class _DecoderLayer:
    """One decoder layer: attention and a gated MLP, each with a residual connection."""

    def __init__(self, layer: Any, index: int, heads: _Heads) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.heads = heads
        # Mistral has a window in every layer, from its config; in the other families each layer sets its own.
        source = attention.config if attention.config.model_type == "mistral" else attention
        self.window: int | None = getattr(source, "sliding_window", None)
        self.input_norm = layer.input_layernorm.weight
        self.post_attention_norm = layer.post_attention_layernorm.weight
        has_norms = hasattr(attention, "q_norm")
        self.q_norm: Tensor | None = attention.q_norm.weight if has_norms else None
        self.k_norm: Tensor | None = attention.k_norm.weight if has_norms else None
        self.qkv = FusedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _linear(attention.o_proj)
        self.gate_up = FusedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = _linear(mlp.down_proj)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, steps: LayerOps) -> Tensor:
        """[P, H] → [P, H]: run the layer."""
        heads = self.heads
        flat = self.qkv(steps.rms_norm(x, self.input_norm, heads.eps))
        qkv = flat.view(len(flat), -1, heads.width)
        if torch.is_grad_enabled() or steps is not EAGER_OPS:
            q, k, v = torch.split(qkv, [heads.query, heads.key, heads.key], 1)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = steps.rms_norm(q, self.q_norm, heads.eps), steps.rms_norm(k, self.k_norm, heads.eps)
            q, k = steps.apply_rotary(q, cos, sin), steps.apply_rotary(k, cos, sin)
        else:
            qk, v = torch.split(qkv, [heads.query + heads.key, heads.key], 1)
            q, k = torch.split(self._norm_and_rotate(qk, cos, sin), [heads.query, heads.key], 1)
        attended = attend(self.index, q, k, v, scale=heads.scale, window=self.window, softcap=None)
        x = x + self.out(attended.flatten(1))
        return x + self.down(steps.gated_silu(self.gate_up(steps.rms_norm(x, self.post_attention_norm, heads.eps))))

    def decode(self, x: Tensor, residual: Tensor | None, ops: StepOps) -> tuple[Tensor, Tensor]:
        """[R, H], [R, H] → [R, H], [R, H]: run the layer on the sum of both; return the next two."""
        heads = self.heads
        residual, normed = ops.add_norm(x, residual, self.input_norm, heads.eps)
        qkv = self.qkv(normed).view(len(x), -1, heads.width)
        q = ops.write(self.index, qkv, self.q_norm, self.k_norm, heads.eps)
        attended = ops.attend(self.index, q, scale=heads.scale, window=self.window)
        residual, normed = ops.add_norm(self.out(attended.flatten(1)), residual, self.post_attention_norm, heads.eps)
        return residual, self.down(ops.gated_silu(self.gate_up(normed)))

    def _norm_and_rotate(self, qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[P, Hq + Hk, D]: norm and rotate queries and keys together, in half as many steps."""
        if self.q_norm is not None and self.k_norm is not None:
            heads = self.heads
            weight = torch.cat([self.q_norm.expand(heads.query, -1), self.k_norm.expand(heads.key, -1)])
            qk = EAGER_OPS.rms_norm(qk, weight, heads.eps)
        return EAGER_OPS.apply_rotary(qk, cos, sin)

    def linear_weights(self) -> list[LinearWeight]:
        """See `Backbone`."""
        return [weight for part in (self.qkv, self.out, self.gate_up, self.down) for weight in part.linear_weights()]


def _rotation_signs(sin: Tensor) -> Tensor:
    """[D]: −1 in the first half, 1 in the second: the signs of the sines in a rotation."""
    half = sin.shape[-1] // 2
    return torch.ones(2 * half, dtype=sin.dtype, device=sin.device).index_fill_(
        0, torch.arange(half, device=sin.device), -1
    )


class FusedBackbone(Backbone):
    """A model of these families; see `Backbone`."""

    def __init__(self, module: PreTrainedModel) -> None:
        body: Any = module.base_model
        config = module.config
        width = body.layers[0].self_attn.head_dim
        query = config.num_attention_heads
        keys = config.num_key_value_heads
        eps = config.rms_norm_eps
        heads = _Heads(query, keys, width, width**-0.5, eps)
        self.embedding = body.embed_tokens
        self.rotary = body.rotary_emb
        self.norm = body.norm
        self.eps = eps
        self.layers = [_DecoderLayer(layer, index, heads) for index, layer in enumerate(body.layers)]
        self._compiled: LayerOps | None = None

    def compile(self) -> None:
        self._compiled = compile_layer_ops(self.embedding.weight.device)

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: AttentionFn, checkpointing: ActivationCheckpointing
    ) -> Tensor:
        x = embedding(ids, self.embedding.weight)
        cos, sin = (angle[0] for angle in self.rotary(x[None], positions[None]))
        sin = sin * _rotation_signs(sin)
        steps = EAGER_OPS if self._compiled is None or torch.is_inference_mode_enabled() else self._compiled
        for layer in self.layers:
            x = checkpoint_layer(layer, checkpointing)(x, cos, sin, attend, steps)
        return steps.rms_norm(x, self.norm.weight, self.eps)

    def decode(self, ids: Tensor, ops: StepOps) -> Tensor:
        """[R] → [R, H]: compute one token of each row of a decode step, without gradients."""
        x = embedding(ids, self.embedding.weight)
        residual: Tensor | None = None
        for layer in self.layers:
            residual, x = layer.decode(x, residual, ops)
        return ops.add_norm(x, residual, self.norm.weight, self.eps)[1]

    def rotary_table(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of so many positions [length, D]; see `layer_ops.apply_rotary`."""
        weight = self.embedding.weight
        cos, sin = (angle[0] for angle in self.rotary(weight[:1], torch.arange(length, device=weight.device)[None]))
        return cos, sin * _rotation_signs(sin)

    def linear_weights(self) -> list[LinearWeight]:
        return [weight for layer in self.layers for weight in layer.linear_weights()]
