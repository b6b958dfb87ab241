"""The small steps as torch.compile makes them, for training: one kernel for each, forward and backward.

They are written like their formulas, and differentiated by autograd. Compiled, no intermediate value is rounded to half
precision, so that results differ from those of `layer_ops` by rounding. Compiling takes some tens of seconds when a run
starts, less where torch finds its kernels cached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import silu

from etude.errors import ConfigError
from etude.models.layer_ops import LayerOps


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms_norm(x, weight, eps)


def _rms_norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms_norm(x, weight, eps)


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (a, b), (ca, cb), (sa, sb) = (each.chunk(2, -1) for each in (x, cos[:, None], sin[:, None]))
    return torch.cat([a * ca + b * sa, b * cb + a * sb], -1)


def _gated_silu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


@cache
def compile_layer_ops(device: torch.device) -> LayerOps:
    """The steps, compiled for tensors of any length; refused where torch cannot compile for this device."""
    made = (torch.compile(step, dynamic=True) for step in (_rms_norm_rows, _rms_norm_heads, _apply_rotary, _gated_silu))
    of_rows, of_heads, rotated, gated_silu = made

    def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return of_rows(x, weight, eps) if x.ndim == 2 else of_heads(x, weight, eps)  # each compiled for its own shapes

    _refuse_failure(gated_silu, device)
    return LayerOps(normed, rotated, gated_silu)


def refuse_without_compiler(device: torch.device, backend: str) -> None:
    """Compile a small step, and refuse `train.compile` where torch cannot compile for this device."""
    _refuse_failure(torch.compile(_gated_silu, dynamic=True, backend=backend), device)


def _refuse_failure(gated_silu: Callable[[Tensor], Tensor], device: torch.device) -> None:
    try:
        tried = torch.ones(3, 4, device=device, requires_grad=True)
        gated_silu(tried).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(
            f"`train.compile` needs a compiler that torch can call, and a small trial failed: "
            f"{str(error).strip().splitlines()[0]} Install one (g++ or clang for a CPU, triton for a GPU), or leave it "
            f"out."
        ) from error
