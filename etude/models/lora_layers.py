"""The computation of low-rank adapters, and the switch that disables them.

peft's layers hold the adapters: `base_layer` is the linear map that is adapted, `lora_A` and `lora_B` are the two
factors, and `scaling` multiplies their product. Fused layers also fuse the adapters of their maps.

    x ──► W x (+ b) ─────────────────────────────────► + ──► out        frozen
     └──► A x: every part's first factor in one product ──► B of each part, scaled        trained
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from etude.models.checkpointing import products_are_kept

ADAPTER = "default"
"""peft's name for the one adapter of a model."""

_OFF: ContextVar[bool] = ContextVar("adapters_off", default=False)
_INNER = re.compile(rf"\.base_layer(?=\.)|(?<=\.lora_[AB])\.{ADAPTER}(?=\.)")


@contextmanager
def without_adapters() -> Iterator[None]:
    """Disable the adapters on this thread: within this context, adapted layers compute their base layer only.

    It is for passes without a gradient: a backward pass that recomputes activations would run outside this context.
    """
    assert not torch.is_grad_enabled(), "adapters are left out where no gradient is taken"
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def adapters_disabled() -> bool:
    """Return true if adapters are disabled on this thread."""
    return _OFF.get()


def is_adapted(part: nn.Module) -> bool:
    """Return true if a module is a peft layer around a base layer."""
    return hasattr(part, "lora_A") and hasattr(part, "base_layer")


def adapted_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return the adapted layers, by name."""
    return ((name, part) for name, part in module.named_modules() if is_adapted(part))


def get_base_layer(part: Any) -> Any:
    """Return the linear map itself, without its adapter."""
    return part.base_layer if is_adapted(part) else part


def external_name(name: str) -> str:
    """Return a parameter's published name, which is its name in peft's files without the prefix.

    An adapted map's own weight is `….q_proj.weight`, its adapter's first factor `….q_proj.lora_A.weight`.
    """
    return _INNER.sub("", name)


def make_adapters_switchable(module: nn.Module) -> None:
    """Make the adapters of a module with its own forward pass follow `without_adapters`."""
    for _, layer in adapted_layers(module):
        layer.forward = MethodType(_forward, layer)


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Run peft's forward pass, or the base layer's. peft's own switch acts on all threads, which may share a model."""
    out: Tensor = layer.base_layer(x) if not is_compiling() and _OFF.get() else type(layer).forward(layer, x)
    return out


def merge_adapter(layer: Any, weight: Tensor) -> Tensor:
    """Return an adapted layer's merged weight: W + s · B A, computed in float32 or wider and rounded once.

    weight: W, whole. Ranks that split the factors call it together.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    down, up = (_whole(factor[ADAPTER].weight.detach()).to(wide) for factor in (layer.lora_A, layer.lora_B))
    delta: Tensor = (up @ down).mul_(layer.scaling[ADAPTER])
    return delta.T.add(weight).to(weight.dtype) if layer.fan_in_fan_out else delta.add_(weight).to(weight.dtype)


def _whole(factor: Tensor) -> Tensor:
    return factor.full_tensor() if isinstance(factor, DTensor) else factor


def fuse_storage(parameters: Sequence[Any]) -> Tensor:
    """Return the concatenated parameters, and make each a view of its part, which stays a leaf for the optimizer.

    Adjacent parameters are not moved.
    """
    tensors: list[Tensor] = [parameter.data for parameter in parameters]
    if not _are_adjacent(tensors):
        fused = torch.cat(tensors)
        for parameter, part in zip(parameters, torch.split(fused, [len(tensor) for tensor in tensors]), strict=True):
            parameter.data = part
        return fused
    return tensors[0].as_strided((sum(map(len, tensors)), *tensors[0].shape[1:]), tensors[0].stride())


def _are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Return true if each tensor begins in memory where the one before it ends."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    adjacent = all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(tensors))
    return len(storages) == 1 and adjacent and all(tensor.is_contiguous() for tensor in tensors)


class FusedLora:
    """The adapters of linear maps with the same input; some maps may have none.

    The first factors are views of one storage, like fused weights: one product computes them, and one computes their
    gradients.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.downs: list[Any] = []  # [r, I] each
        self.ups: list[Any] = []  # [O, r] each
        self.scales: list[float] = []
        self.columns: list[slice] = []
        """The columns of the concatenated outputs that each adapter adds to."""
        start = 0
        for part in parts:
            stop = start + len(get_base_layer(part).weight)
            if is_adapted(part):
                self.downs.append(part.lora_A[ADAPTER].weight)
                self.ups.append(part.lora_B[ADAPTER].weight)
                self.scales.append(part.scaling[ADAPTER])
                self.columns.append(slice(start, stop))
            start = stop
        self.down = fuse_storage(self.downs)
        self.ranks = [len(down) for down in self.downs]

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """[P, ΣO], [P, I] → [P, Σr]: add the adapters' products to `out` in place; return the first factors' output."""
        inner = linear(x, self.down)
        parts = zip(torch.split(inner, self.ranks, 1), self.ups, self.scales, self.columns, strict=True)
        for between, up, scale, columns in parts:
            out[:, columns].addmm_(between, up.T, alpha=scale)
        return inner


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, low: FusedLora) -> Tensor:
    """[P, I] → [P, ΣO] with adapters, differentiable with respect to the input and the adapters' factors."""
    out: Tensor = _AdaptedLinear.apply(x, weight, bias, low, *low.downs, *low.ups)  # type: ignore[no-untyped-call]
    return out


class _AdaptedLinear(torch.autograd.Function):
    """A frozen linear map with adapters. The map costs two products of its size: forward, and the input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: FusedLora, *factors: Tensor) -> Tensor:
        out = linear(x, weight, bias)
        if products_are_kept():
            out = out.clone()
        inner = low.add(out, x)
        ctx.low = low
        ctx.save_for_backward(x, inner, weight, low.down, *factors[len(low.downs) :])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, weight, down, *ups = ctx.saved_tensors
        low, (grad,) = ctx.low, grads
        of_inner = torch.empty_like(inner)
        into_ups = []
        parts = zip(
            *(torch.split(x, low.ranks, 1) for x in (inner, of_inner)), ups, low.scales, low.columns, strict=True
        )
        for between, of_between, up, scale, columns in parts:
            of_part = grad[:, columns]
            of_between.copy_((of_part @ up).mul_(scale))
            into_ups.append((of_part.T @ between).mul_(scale))
        into_downs = torch.split(of_inner.T @ x, low.ranks)
        into_x = torch.addmm(grad @ weight, of_inner, down) if ctx.needs_input_grad[0] else None
        return into_x, None, None, None, *into_downs, *into_ups
