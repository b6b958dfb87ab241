"""A ledger of memory: every tensor that a computation makes, from when its memory is taken to when it is given back.

It stands between torch and its kernels, and is told the outcome of each. What it writes down are storages: a view has
no memory of its own, and a storage is given back when the last tensor or graph that holds it has gone, or when its
memory is taken from it (`record_resize`). What each was for may be said while it is made, or at any later time: a
gradient is known as one when the optimizer asks for it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MemoryTracker", "PeakMemory"]

TensorLabeler = Callable[[Tensor], str | None]


@dataclass(frozen=True)
class PeakMemory:
    """The moment at which most memory was held."""

    total: int
    """Bytes."""
    kinds: Mapping[str, int]
    """Bytes of each kind, at that moment; what is nothing is left out."""


@dataclass(frozen=True)
class _Phase:
    """A stretch of the ledger."""

    name: str
    first: int
    last: int


class MemoryTracker:
    """What was taken and given back, in order.

    Written to by whoever runs the computation, on one thread; read when it is over.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int]] = []
        self._kinds: list[str | None] = []
        self._sizes: list[int] = []
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._phases: list[_Phase] = []
        self._kind: str | None = "other"
        self._labeler: TensorLabeler = lambda _: None

    def record(self, tensor: Tensor, kind: str | None = None) -> None:
        """A tensor that may have come with memory of its own."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        number = len(self._kinds)
        self._kinds.append(kind or self._labeler(tensor) or self._kind)
        self._sizes.append(storage.nbytes())
        self._entries.append((number, self._sizes[number]))

        def on_free(_: object) -> None:
            self._live.pop(key, None)
            self._entries.append((number, -self._sizes[number]))

        self._live[key] = number, weakref.ref(storage, on_free)

    def record_resize(self, storage: torch.UntypedStorage) -> None:
        """It has other memory than before, which was given back once what lay there had been copied."""
        if (entry := self._live.get(storage._cdata)) is not None:
            number = entry[0]
            self._entries += [(number, storage.nbytes()), (number, -self._sizes[number])]
            self._sizes[number] = storage.nbytes()

    def record_temporary(self, size: int) -> None:
        """So many bytes that a kernel took within, and has given back."""
        self._kinds.append(self._kind)
        self._sizes.append(size)
        self._entries += [(len(self._kinds) - 1, size), (len(self._kinds) - 1, -size)]

    def label(self, tensors: Iterable[Tensor], kind: str | None) -> None:
        """These are of this kind, from when they were made; None is what does not count."""
        for tensor in tensors:
            self.record(tensor)
            self._kinds[self._live[tensor.untyped_storage()._cdata][0]] = kind

    def kind_of(self, tensor: Tensor) -> str | None:
        """What a tensor is known as."""
        self.record(tensor)
        return self._kinds[self._live[tensor.untyped_storage()._cdata][0]]

    @contextmanager
    def labeled_as(self, kind: str | None, labeler: TensorLabeler = lambda _: None) -> Iterator[None]:
        """What is made within is of this kind, unless `named` knows better of a tensor. None: it does not count."""
        before = self._kind, self._labeler
        self._kind, self._labeler = kind, labeler
        try:
            yield
        finally:
            self._kind, self._labeler = before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is held within, whenever it was taken, is a phase's."""
        first = len(self._entries)
        try:
            yield
        finally:
            self._phases.append(_Phase(name, first, len(self._entries)))

    @property
    def phases(self) -> list[str]:
        """Their names, in order."""
        return list(dict.fromkeys(phase.name for phase in self._phases))

    def peak(self, phase: str | None = None, excluded: frozenset[str] = frozenset()) -> PeakMemory:
        """The most that was held at once, ever or in the phases of a name; without the kinds that were away."""
        spans = [span for span in self._phases if span.name == phase]
        spans = spans or [_Phase("", 0, len(self._entries))]
        counted = [kind is not None and kind not in excluded for kind in self._kinds]
        total, position = self._highest(spans, counted)
        kinds: Counter[str] = Counter()
        for number, size in self._entries[:position]:
            kind = self._kinds[number]
            if kind is not None and counted[number]:
                kinds[kind] += size
        return PeakMemory(total, {kind: size for kind, size in kinds.items() if size})

    def _highest(self, spans: list[_Phase], counted: list[bool]) -> tuple[int, int]:
        """The most bytes within the stretches, and after how many entries."""
        boundaries = {position for span in spans for position in (span.first, span.last)}
        peak, peak_position, total, depth = -1, 0, 0, 0
        starts = Counter(span.first for span in spans)
        ends = Counter(span.last for span in spans)
        for position, (number, size) in enumerate([*self._entries, (-1, 0)]):
            if position in boundaries:
                depth += starts[position]
                if depth and total > peak:
                    peak, peak_position = total, position
                depth -= ends[position]
            if number < 0:
                break
            total += size if counted[number] else 0
            if depth and total > peak:
                peak, peak_position = total, position + 1
        return max(peak, 0), peak_position
