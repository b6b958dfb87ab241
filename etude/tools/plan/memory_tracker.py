"""The memory tracker: every storage that a computation allocates, from its allocation to its release; and its trace.

It records the results of each operator. A view has no memory, so storages are recorded. A storage is
released when the last tensor or graph that uses it is freed, or when it is resized (`record_resize`). The kind of a
tensor may be set when it is created or later: a gradient is labeled when the optimizer reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.train.optim import local_part

IntArray = NDArray[np.int64]
TensorLabeler = Callable[[Tensor], str | None]


@dataclass(frozen=True)
class PeakMemory:
    """The memory at the moment of highest use."""

    total: int
    """Bytes."""
    kinds: Mapping[str, int]
    """Bytes of each kind at that moment, without kinds of 0 bytes."""


@dataclass(frozen=True)
class Phase:
    """A range of entries. All memory in use during the range counts for it, also if it was allocated before."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class MemoryTrace:
    """Entries of allocated or released bytes. None has 0 bytes."""

    sizes: IntArray
    """Bytes; negative for a release."""
    kinds: IntArray
    """The kind of each entry, as an index of `kind_names`."""
    kind_names: Sequence[str | None]
    """The kinds; None is that of memory which does not count."""
    operators: Sequence[str]
    """The operator that allocated the memory of each entry."""
    spans: Sequence[Phase]
    """The phases, in order; phases may share a name."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def phases(self) -> list[str]:
        """The names of the phases, in order."""
        return list(dict.fromkeys(span.name for span in self.spans))

    def peak(
        self, phase: str | None = None, excluded: frozenset[str] = frozenset(), only: frozenset[str] | None = None
    ) -> PeakMemory:
        """Return the peak memory, of the whole computation or of the phases of a name.

        It counts all kinds but the excluded ones, or only some.
        """
        counts = [
            kind is not None and kind not in excluded and (only is None or kind in only) for kind in self.kind_names
        ]
        spans = [span for span in self.spans if span.name == phase] or [Phase("", 0, len(self))]
        totals = np.concatenate([[0], np.cumsum(np.where(np.array(counts)[self.kinds], self.sizes, 0))])
        tops = [span.first + int(totals[span.first : span.last + 1].argmax()) for span in spans]
        top = max(tops, key=lambda position: int(totals[position]))
        return PeakMemory(int(totals[top]), self._live(top, counts))

    def _live(self, position: int, counts: Sequence[bool]) -> dict[str, int]:
        """Return the bytes of each counted kind after so many entries, without kinds of 0 bytes."""
        weights, number = self.sizes[:position], len(self.kind_names)
        sizes = np.bincount(self.kinds[:position], weights=weights, minlength=number).tolist()
        live = zip(self.kind_names, sizes, counts, strict=True)
        return {kind: int(size) for kind, size, counted in live if kind is not None and counted and size}


class MemoryTracker:
    """The allocations and releases of a computation, in order.

    One thread runs the computation and records it; the result is read afterwards.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int]] = []
        self._kinds: list[str | None] = []
        self._operators: list[str] = []
        self._sizes: list[int] = []
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._phases: list[Phase] = []
        self._kind: str | None = "other"
        self._labeler: TensorLabeler = lambda _: None

    def record(self, tensor: Tensor, kind: str | None = None, operator: str = "") -> None:
        """Record a tensor, if its storage is new. operator: the name of the operator that returned it."""
        storage = local_part(tensor).untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        number = len(self._kinds)
        self._kinds.append(kind or self._labeler(tensor) or self._kind)
        self._operators.append(operator)
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
        self._operators.append("")
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
        self._kind = kind
        self._labeler = labeler
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
            self._phases.append(Phase(name, first, len(self._entries)))

    def trace(self) -> MemoryTrace:
        """Return all entries so far, without those of 0 bytes."""
        entries = [(number, size) for number, size in self._entries if size]
        position = [0, *accumulate(int(size != 0) for _, size in self._entries)]
        kind_names = list(dict.fromkeys(self._kinds))
        index = {kind: number for number, kind in enumerate(kind_names)}
        return MemoryTrace(
            sizes=np.array([size for _, size in entries], dtype=np.int64),
            kinds=np.array([index[self._kinds[number]] for number, _ in entries], dtype=np.int64),
            kind_names=kind_names,
            operators=[self._operators[number] for number, _ in entries],
            spans=[Phase(span.name, position[span.first], position[span.last]) for span in self._phases],
        )
