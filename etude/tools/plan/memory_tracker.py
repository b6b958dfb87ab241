"""The memory tracker: every storage that a computation allocates, from its allocation to its release.

It records the results of each operator. A view has no memory of its own, so storages are recorded. A storage is
released when the last tensor or graph that uses it is gone, or when it is resized (`record_resize`). The kind of a
tensor may be set when it is created or later: a gradient is labeled when the optimizer reads it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.train.optim import local_part

__all__ = ["MemoryTracker", "PeakMemory"]

TensorLabeler = Callable[[Tensor], str | None]


@dataclass(frozen=True)
class PeakMemory:
    """The memory at the moment of highest use."""

    total: int
    """Bytes."""
    kinds: Mapping[str, int]
    """Bytes of each kind at that moment, without kinds of 0 bytes."""


@dataclass(frozen=True)
class _Phase:
    """A range of the tracker's entries."""

    name: str
    first: int
    last: int


class MemoryTracker:
    """The allocations and releases of a computation, in order.

    One thread runs the computation and records it; the result is read afterwards.
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
        """Record a tensor, if its storage is new."""
        storage = local_part(tensor).untyped_storage()
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
        """Record that a storage got new memory; the old memory is released after the copy."""
        if (entry := self._live.get(storage._cdata)) is not None:
            number = entry[0]
            self._entries += [(number, storage.nbytes()), (number, -self._sizes[number])]
            self._sizes[number] = storage.nbytes()

    def record_temporary(self, size: int) -> None:
        """Record temporary memory that a kernel allocated and released."""
        self._kinds.append(self._kind)
        self._sizes.append(size)
        self._entries += [(len(self._kinds) - 1, size), (len(self._kinds) - 1, -size)]

    def label(self, tensors: Iterable[Tensor], kind: str | None) -> None:
        """Set the kind of tensors, also for the time before; None excludes them from all counts."""
        for tensor in tensors:
            self.record(tensor)
            self._kinds[self._live[local_part(tensor).untyped_storage()._cdata][0]] = kind

    def kind_of(self, tensor: Tensor) -> str | None:
        """Return the kind of a tensor."""
        self.record(tensor)
        return self._kinds[self._live[local_part(tensor).untyped_storage()._cdata][0]]

    @contextmanager
    def labeled_as(self, kind: str | None, labeler: TensorLabeler = lambda _: None) -> Iterator[None]:
        """Set the kind of tensors created in the block; `labeler` may choose another kind. None excludes them."""
        before = self._kind, self._labeler
        self._kind, self._labeler = kind, labeler
        try:
            yield
        finally:
            self._kind, self._labeler = before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a phase. All memory in use during the block counts for it, also if it was allocated before."""
        first = len(self._entries)
        try:
            yield
        finally:
            self._phases.append(_Phase(name, first, len(self._entries)))

    @property
    def phases(self) -> list[str]:
        """The names of the phases, in order."""
        return list(dict.fromkeys(phase.name for phase in self._phases))

    def peak(
        self, phase: str | None = None, excluded: frozenset[str] = frozenset(), only: frozenset[str] | None = None
    ) -> PeakMemory:
        """Return the peak memory, of the whole computation or of the phases of a name.

        It counts all kinds but the excluded ones, or only some.
        """
        spans = [span for span in self._phases if span.name == phase]
        spans = spans or [_Phase("", 0, len(self._entries))]
        counted = [kind is not None and kind not in excluded and (only is None or kind in only) for kind in self._kinds]
        total, position = self._highest(spans, counted)
        kinds: Counter[str] = Counter()
        for number, size in self._entries[:position]:
            kind = self._kinds[number]
            if kind is not None and counted[number]:
                kinds[kind] += size
        return PeakMemory(total, {kind: size for kind, size in kinds.items() if size})

    def _highest(self, spans: list[_Phase], counted: list[bool]) -> tuple[int, int]:
        """Return the peak bytes within the spans, and the number of entries before it."""
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
