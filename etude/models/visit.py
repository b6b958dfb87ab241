"""Who is told where a pass over a model is: before and after each layer, on the way forward and on the way back.

    enter 0 ─ layer 0 ─ leave 0 ─ enter 1 ─ layer 1 ─ leave 1 ─ …        forward
    leave 0 ◄ layer 0 ◄ enter 0 ◄ leave 1 ◄ layer 1 ◄ enter 1 ◄ …        back, where a gradient is taken

A layer whose activations are computed again is entered once for that and for its gradient. By the time it is left on
the way back, all its weights have their gradients: autograd hands out what is at its end before it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Visits", "visited"]


class Visits(Protocol):
    """Whoever sees to it that a layer's weights are there while they are used."""

    def enter(self, layer: int) -> None:
        """A layer is about to be computed, or its gradient."""
        ...

    def leave(self, layer: int, *, back: bool) -> None:
        """It was."""
        ...


def visited(visits: Visits | None, layer: int, compute: Callable[..., Any], x: Tensor, *more: Any) -> Tensor:
    """What a layer makes of its input and more, where somebody may want to know."""
    out: Tensor
    if visits is None:
        out = compute(x, *more)
        return out
    if torch.is_grad_enabled():
        entered: Tensor = _Entered.apply(x, visits, layer)  # type: ignore[no-untyped-call]
        out = _Left.apply(compute(entered, *more), visits, layer)  # type: ignore[no-untyped-call]
        return out
    visits.enter(layer)
    out = compute(x, *more)
    visits.leave(layer, back=False)
    return out


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, visits: Visits, layer: int) -> Tensor:
        ctx.visits, ctx.layer = visits, layer
        visits.enter(layer)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.visits.leave(ctx.layer, back=True)
        return grads[0], None, None


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, visits: Visits, layer: int) -> Tensor:
        ctx.visits, ctx.layer = visits, layer
        visits.leave(layer, back=False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.visits.enter(ctx.layer)
        return grads[0], None, None
