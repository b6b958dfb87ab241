"""The small steps between matrix products: norm, rotary positions, gated activation.

Each is one node of the graph with an explicit gradient, and saves little more than its input. On a CPU these steps are
bound by memory bandwidth, and autograd would save and read every intermediate result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass(frozen=True)
class LayerOps:
    """One implementation of the steps."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    gated_silu: Callable[[Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[…, D] → […, D]: root-mean-square norm, computed in float32 or wider."""
    if not torch.is_grad_enabled():
        return _scaled(x, weight, eps)[0]
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[P, H, D], [P, D], [P, D] → [P, H, D]: apply rotary positions.

    The angles are constants, and the first half of `sin` is already negated.
    """
    if not torch.is_grad_enabled():
        return torch.addcmul(x * cos[:, None], x.roll(x.shape[-1] // 2, -1), sin[:, None])
    out: Tensor = _Rotate.apply(x, cos[:, None], sin[:, None])  # type: ignore[no-untyped-call]
    return out


def gated_silu(x: Tensor) -> Tensor:
    """[P, 2I] → [P, I]: silu(gate) · up; the first half is the gate."""
    if not torch.is_grad_enabled():
        gate, up = x.chunk(2, -1)
        return silu(gate).mul_(up)
    out: Tensor = _GatedSilu.apply(x)  # type: ignore[no-untyped-call]
    return out


EAGER_OPS = LayerOps(rms_norm, apply_rotary, gated_silu)
"""The steps of this module, without compilation."""


def _scaled(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) · weight, and 1 / rms(x)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).to(x.dtype).mul_(weight), inverse


class _RMSNorm(torch.autograd.Function):
    """y = w · x / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse = _scaled(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        unit = x.to(inverse.dtype) * inverse
        grad = grads[0].to(inverse.dtype)
        into_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        into_x = grad * weight
        along = torch.linalg.vecdot(into_x, unit)[..., None].div_(x.shape[-1])
        into_x.sub_(unit.mul_(along)).mul_(inverse)
        return into_x.to(x.dtype), into_weight, None


class _Rotate(torch.autograd.Function):
    """A rotation by an angle, with the two halves of a head as the two coordinates of a plane."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (a, b), (ca, cb), (sa, sb) = (whole.chunk(2, -1) for whole in (x, cos, sin))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        low, high = out.chunk(2, -1)
        torch.mul(a, ca, out=low).addcmul_(b, sa)
        torch.mul(b, cb, out=high).addcmul_(a, sb)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        (a, b), (ca, cb), (sa, sb) = (whole.chunk(2, -1) for whole in (grads[0], cos, sin))
        into = torch.empty(grads[0].shape, dtype=grads[0].dtype, device=grads[0].device)
        low, high = into.chunk(2, -1)
        torch.mul(a, ca, out=low).addcmul_(b, sb)
        torch.mul(b, cb, out=high).addcmul_(a, sa)
        return into, None, None


class _GatedSilu(torch.autograd.Function):
    """silu(gate) · up; the backward pass recomputes silu."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        into = torch.empty_like(x)
        of_gate, of_up = into.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=of_gate)
        torch.mul(grads[0], silu(gate), out=of_up)
        return (into,)
