"""A second copy of the weights, in the memory layout of the processor's kernels.

The bfloat16 kernels of a CPU need a weight in tiles. Without this layout, a product of few rows spends a third of its
time on the conversion. An engine samples with the same weights thousands of times before they change, so it keeps them
converted. The results are identical and faster, for the memory of a second copy of the weights.
A trainer's weights change with every step, so they are not converted. Code that changes weights must refresh every
engine that shares them. Frozen weights are converted only once.

    prepacked = PrepackedWeights(model.linear_weights)
    with prepacked.activate():       # on the engine's thread: its products now use the copy
        model.hidden(…)
    prepacked.refresh()              # after the weights changed, before their next use
    prepacked.refresh(frozen=False)  # after a step, which does not change frozen weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from etude.observe import get_logger


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """A weight that `prepacked_linear` is called with."""

    weight: Tensor
    trained: bool
    """True if a step of the optimizer changes it, or a part of it."""


class PrepackedWeights:
    """The weights of a model in the kernels' layout; empty where the kernels have no special layout."""

    def __init__(self, linear_weights: Callable[[], Sequence[LinearWeight]]) -> None:
        """linear_weights: returns the weights that `prepacked_linear` is called with."""
        self._linear_weights = linear_weights
        self._packed: dict[int, Tensor] = {}
        self.refresh()

    def refresh(self, *, frozen: bool = True) -> None:
        """Convert the weights again; with `frozen=False`, untrained weights that are converted already stay.

        If there is not enough memory, products use the weights in their own layout.
        """
        wanted = {entry.weight.data_ptr(): entry for entry in self._linear_weights()}
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
            get_logger("models").warning(
                "The weights are not prepacked for the processor, which costs speed: %s", error
            )

    def clear(self) -> None:
        """Free the memory. Products then use the weights in their own layout."""
        self._packed.clear()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Use these weights for the products of this thread."""
        token = _ACTIVE.set(self._packed)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


def can_prepack(weight: Tensor) -> bool:
    """Return true if the kernels of a weight's device have a special layout for it."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and multiplies_bf16()


_ACTIVE: ContextVar[dict[int, Tensor] | None] = ContextVar("prepacked", default=None)


def prepacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[P, I] · [O, I]ᵀ + [O]: a linear map, with the prepacked weight if one is active; then it has no gradient."""
    active = _ACTIVE.get()
    packed = active.get(weight.data_ptr()) if active else None
    if packed is None:
        return linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


@cache
def multiplies_bf16() -> bool:
    """Return true if this processor multiplies bfloat16 natively, and torch was built to use it.

    Elsewhere the kernels widen bfloat16 first: prepacking gains nothing, and sums are rounded differently.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
