"""The operations by which a layer mixes tokens, as the caller of a pass answers them.

The trainer answers within a pack, the engine over its memory, and each check and trial in its own way. transformers'
layers ask the mixer of the current pass; see `transformers_backbone` for attention, and `recurrences` for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from etude.models.backbone import AttentionFn
from etude.models.shapes import AttentionShape, StateShape
from etude.models.states import Recurrence, Rows


class Mixer(AttentionFn, Protocol):
    """Attention, short convolutions and recurrences of one pass."""

    def convolve(self, layer: int, run: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
        """[C, P] → [C, P]: a causal convolution that sees the `width` tokens before each on its path.

        run: convolves [C, n] as one row, with zeros before it.
        """
        ...

    def scan(self, layer: int, recurrence: Recurrence, inputs: Rows) -> Tensor:
        """[P, …] of each input → [P, …]: the outputs of a recurrence, from the state of each token's path."""
        ...


current_mixer: ContextVar[AttentionFn | None] = ContextVar("current_mixer", default=None)
"""The mixer of the pass that runs now: a `Mixer`, if the model has other operations than attention."""
current_layer: ContextVar[int] = ContextVar("current_layer")
"""The index of the layer that runs now."""


@contextmanager
def use_mixer(mixer: AttentionFn | None) -> Iterator[None]:
    """Let this mixer answer the layers' operations within this context."""
    token = current_mixer.set(mixer)
    try:
        yield
    finally:
        current_mixer.reset(token)


class AloneMixer(Mixer):
    """A mixer in which each token is a row of its own, and which records what the layers ask."""

    def __init__(self) -> None:
        self.attention: dict[int, AttentionShape] = {}
        """The heads of each layer that attends."""
        self.states: dict[int, StateShape] = {}
        """What each recurrent layer hands from one token to the next."""
        self.calls: list[tuple[str, int]] = []
        """The operations and their layers, in order."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **_: object
    ) -> Tensor:
        """Return each token's own value, because the mean over one value is that value."""
        del sinks
        self.calls.append(("attention", layer))
        self.attention[layer] = AttentionShape(q.shape[1], k.shape[1], k.shape[2], v.shape[2])
        return v.repeat_interleave(q.shape[1] // k.shape[1], 1)

    def convolve(self, layer: int, run: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
        """Convolve each token with zeros before it."""
        self._record("convolution", layer, width * x.shape[0] * x.itemsize, (width + 1) * x.shape[0])
        apart = torch.cat([x.new_zeros(x.shape[0], x.shape[1], width), x[:, :, None]], 2)
        return run(apart.flatten(1)).view(x.shape[0], x.shape[1], -1)[:, :, width]

    def scan(self, layer: int, recurrence: Recurrence, inputs: Rows) -> Tensor:
        """Begin each token with a state of zero."""
        out, last = recurrence.run(tuple(x[:, None] for x in inputs), None)
        self._record("recurrence", layer, last[0].nbytes, recurrence.products * last[0].numel())
        return out[:, 0]

    def _record(self, operation: str, layer: int, num_bytes: int, products: int) -> None:
        self.calls.append((operation, layer))
        before = self.states.get(layer, StateShape(0, 0))
        self.states[layer] = StateShape(before.num_bytes + num_bytes, before.products + products)
