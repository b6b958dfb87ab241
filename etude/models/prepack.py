"""Weights once more, laid out as the processor multiplies them.

A CPU that multiplies bfloat16 itself wants a weight in tiles, and a product of few rows spends a third of its time on
putting it there. An engine draws with the same weights thousands of times before they change, so it keeps them in that
order: the very same numbers come out, sooner, for the memory of the weights again. A trainer's change with every step,
and stay as they are. Whoever changes weights that several engines share tells each of them. Weights that are not
trained need be read once.

    prepacked = PrepackedWeights(model)
    with prepacked.activate():           # on the engine's thread: products now go through it
        model.hidden(…)
    prepacked.refresh()              # after the weights changed, before they are used again
    prepacked.refresh(frozen=False)  # after a step, which leaves frozen weights alone
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from etude.observe import get_logger

__all__ = ["LinearWeight", "PrepackedWeights", "can_prepack", "multiplies_bf16", "prepacked_linear"]


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """A weight that `prepacked_linear` is called with."""

    weight: Tensor
    trained: bool
    """Whether a step of the optimizer changes it, or a part of it."""


class HasLinearWeights(Protocol):
    """A model, as far as its products go."""

    def linear_weights(self) -> list[LinearWeight]:
        """The weights that `prepacked_linear` is called with."""
        ...


class PrepackedWeights:
    """The weights of a model in the order of the kernels, where these have one of their own; else nothing."""

    def __init__(self, model: HasLinearWeights) -> None:
        self._model = model
        self._packed: dict[int, Tensor] = {}
        self.refresh()

    def refresh(self, *, frozen: bool = True) -> None:
        """Read the weights anew; without `frozen`, of those that are not trained only what is not held yet. Where
        there is no memory for that, products take the weights as they lie."""
        wanted = {entry.weight.data_ptr(): entry for entry in self._model.linear_weights()}
        unchanged = set() if frozen else {address for address, entry in wanted.items() if not entry.trained}
        retained = {address: packed for address, packed in self._packed.items() if address in unchanged}
        self.clear()
        self._packed.update(retained)
        try:
            for address, entry in wanted.items():
                weight = entry.weight.detach()
                if address not in retained and can_prepack(weight):
                    self._packed[address] = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        except (RuntimeError, MemoryError) as error:
            self.clear()
            get_logger("models").warning("The weights are not laid out for the processor, which costs speed: %s", error)

    def clear(self) -> None:
        """Give the memory back. Products then take the weights as they lie."""
        self._packed.clear()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Products of this thread go through it."""
        token = _ACTIVE.set(self._packed)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


def can_prepack(weight: Tensor) -> bool:
    """Whether the kernels of where a weight lies have an order of their own for it."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and multiplies_bf16()


_ACTIVE: ContextVar[dict[int, Tensor] | None] = ContextVar("prepacked", default=None)


def prepacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[P, I] · [O, I]ᵀ + [O]: a linear map, by the laid-out weight where one is used. It has no gradient then."""
    active = _ACTIVE.get()
    packed = active.get(weight.data_ptr()) if active else None
    if packed is None:
        return linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


@cache
def multiplies_bf16() -> bool:
    """Whether this processor multiplies bfloat16 itself, and torch was built to have it do so. Elsewhere the kernels
    widen it first: nothing is gained, and sums are rounded otherwise."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
