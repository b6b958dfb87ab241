"""The memory of a computation over time: its allocations and releases, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


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
