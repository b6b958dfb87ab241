"""Low-rank adapters as they are computed, and the switch that leaves them out.

peft's layers hold them: `base_layer` is the linear map that is adapted, `lora_A` and `lora_B` are the two factors, and
`scaling` says how often their product counts. Where our own layers run several maps as one, their adapters are too:

    x ──► W x (+ b) ─────────────────────────────────► + ──► out        frozen
     └──► A x: every part's first factor in one product ──► B of each part, scaled        trained
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from etude.models.fused_storage import fuse_storage

__all__ = [
    "ADAPTER",
    "FusedLora",
    "adapted_layers",
    "adapted_linear",
    "adapters_disabled",
    "external_name",
    "get_base_layer",
    "is_adapted",
    "make_adapters_switchable",
    "merge_adapter",
    "without_adapters",
]

ADAPTER = "default"
"""What peft calls the one adapter that a model has."""

_OFF: ContextVar[bool] = ContextVar("adapters_off", default=False)
_INNER = re.compile(rf"\.base_layer(?=\.)|(?<=\.lora_[AB])\.{ADAPTER}(?=\.)")


@contextmanager
def without_adapters() -> Iterator[None]:
    """Within, on this thread, adapted layers compute what they computed before they were adapted.

    For what is told without a gradient: a backward pass that computes activations again would not know of it.
    """
    assert not torch.is_grad_enabled(), "adapters are left out where no gradient is taken"
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def adapters_disabled() -> bool:
    """Whether this thread leaves adapters out."""
    return _OFF.get()


def is_adapted(part: nn.Module) -> bool:
    """Whether a part is one of peft's layers around another."""
    return hasattr(part, "lora_A") and hasattr(part, "base_layer")


def adapted_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The adapted layers, by name."""
    return ((name, part) for name, part in module.named_modules() if is_adapted(part))


def get_base_layer(part: Any) -> Any:
    """The linear map itself, without its adapter."""
    return part.base_layer if is_adapted(part) else part


def external_name(name: str) -> str:
    """A parameter's name as it is known outside: `….q_proj.weight` for the adapted map's own, `….q_proj.lora_A.weight`
    for its adapter's, as peft names them in a file."""
    return _INNER.sub("", name)


def make_adapters_switchable(module: nn.Module) -> None:
    """Have the adapters of a module that runs by itself obey `without_adapters`."""
    for _, layer in adapted_layers(module):
        layer.forward = MethodType(_forward, layer)


def _forward(layer: Any, x: Tensor) -> Tensor:
    """peft's own, or that of the layer it adapts. peft's switch is one for all threads; an engine may share a model."""
    out: Tensor = layer.base_layer(x) if _OFF.get() else type(layer).forward(layer, x)
    return out


def merge_adapter(layer: Any) -> Tensor:
    """The weight of an adapted layer with the adapter added in: W + s · B A, computed in float32 or wider and rounded
    once."""
    weight: Tensor = layer.base_layer.weight.detach()
    wide = torch.promote_types(weight.dtype, torch.float32)
    down, up = (factor[ADAPTER].weight.detach().to(wide) for factor in (layer.lora_A, layer.lora_B))
    delta: Tensor = (up @ down).mul_(layer.scaling[ADAPTER])
    return delta.T.add(weight).to(weight.dtype) if layer.fan_in_fan_out else delta.add_(weight).to(weight.dtype)


class FusedLora:
    """The adapters of linear maps of the same input, of which some may have none.

    The first factors are views of one storage, as fused weights are: one product runs them, and one gives their
    gradients.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.downs: list[Any] = []  # [r, I] each
        self.ups: list[Any] = []  # [O, r] each
        self.scales: list[float] = []
        self.columns: list[slice] = []
        """Which of the outputs, side by side, each of them adds to."""
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
        """[P, ΣO], [P, I] → [P, Σr]: add the adapters' products to the maps' in place; returns what lies between their
        two factors."""
        inner = linear(x, self.down)
        parts = zip(torch.split(inner, self.ranks, 1), self.ups, self.scales, self.columns, strict=True)
        for between, up, scale, columns in parts:
            out[:, columns].addmm_(between, up.T, alpha=scale)
        return inner


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, low: FusedLora) -> Tensor:
    """[P, I] → [P, ΣO] with adapters, differentiable by the input and by the adapters' factors."""
    out: Tensor = _AdaptedLinear.apply(x, weight, bias, low, *low.downs, *low.ups)  # type: ignore[no-untyped-call]
    return out


class _AdaptedLinear(torch.autograd.Function):
    """The frozen product costs two products of its size, forward and for the input's gradient; its weight has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: FusedLora, *factors: Tensor) -> Tensor:
        out = linear(x, weight, bias)
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
