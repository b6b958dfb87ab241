"""The memory trace of a model with many layers, from the traces of two dry runs with few.

A dry run does the same for each layer. So one more layer inserts a few runs of entries into the trace: one into each
forward pass, one into each backward pass, one into each loop over the weights. The trace of n layers has each of these
runs as often as it has layers more. Entries whose size depends on the number of layers, such as the KV cache's, grow
by the same bytes with each. No peak is extrapolated: the whole trace is composed, and its peaks are read from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from etude.tools.plan.memory_tracker import IntArray, MemoryTrace, Phase

SHORTEST = 2
"""The fewest entries that must agree behind an inserted run."""
SIZE, KIND, EXACT, ALIKE = range(4)
"""The columns of a part of a trace, with an entry in each row. `EXACT` is a number for entries of one size, kind and
operator, and `ALIKE` for allocations, or for releases, of one kind and operator."""
MAX_RESIZED = 2
"""The most sizes among the entries that agree which may depend on the number of layers."""


@dataclass(frozen=True)
class Repeat:
    """A dry run in which one model has one period of layers more, and the number of periods to add in all."""

    trace: MemoryTrace
    count: int


@dataclass(frozen=True)
class _Insertion:
    """Entries to insert `count` times before the entry at a position."""

    position: int
    entries: IntArray
    count: int


class _Tables:
    """The numbers of kinds and entries, the same in all traces."""

    def __init__(self) -> None:
        self.kinds: dict[str | None, int] = {}
        self._entries: dict[object, int] = {}

    def parts(self, trace: MemoryTrace) -> list[IntArray]:
        """Return a trace in parts: before the first phase, the first phase, between two phases, the second …"""
        kind_numbers = [self.kinds.setdefault(kind, len(self.kinds)) for kind in trace.kind_names]
        kinds = np.array(kind_numbers, dtype=np.int64)[trace.kinds]
        keys = list(zip(trace.sizes.tolist(), kinds.tolist(), trace.operators, strict=True))
        exact = [self._number(key) for key in keys]
        alike = [self._number((size > 0, kind, name)) for size, kind, name in keys]
        entries = np.stack([trace.sizes, kinds, np.array(exact, np.int64), np.array(alike, np.int64)], axis=1)
        bounds = [0, *(position for span in trace.spans for position in (span.first, span.last)), len(trace)]
        return [entries[start:stop] for start, stop in pairwise(bounds)]

    def _number(self, key: object) -> int:
        return self._entries.setdefault(key, len(self._entries))


def extrapolate(few: MemoryTrace, repeats: Sequence[Repeat]) -> MemoryTrace | None:
    """Return the trace with all layers. None if a trace differs from that of few layers by more than inserted runs."""
    tables = _Tables()
    parts, longer = tables.parts(few), [tables.parts(repeat.trace) for repeat in repeats]
    if any(len(others) != len(parts) for others in longer):
        return None
    composed = []
    for index, part in enumerate(parts):
        resized, insertions = part.copy(), list[_Insertion]()
        for repeat, others in zip(repeats, longer, strict=True):
            is_phase = index % 2 == 1
            found = (_match if is_phase else _difference)(part, others[index], resized, repeat.count)
            if found is None:
                return None
            insertions += found
        composed.append(_compose(resized, insertions))
    ends = np.cumsum([len(part) for part in composed]).tolist()
    entries = np.concatenate(composed)
    trace = MemoryTrace(
        sizes=entries[:, SIZE],
        kinds=entries[:, KIND],
        kind_names=list(tables.kinds),
        operators=(),
        spans=[Phase(span.name, ends[2 * index], ends[2 * index + 1]) for index, span in enumerate(few.spans)],
    )
    return trace if _is_possible(trace) else None


def _difference(part: IntArray, other: IntArray, _: IntArray, count: int) -> list[_Insertion]:
    """Return the bytes that one period adds between two phases, in one entry for each kind; releases come first."""
    added = np.zeros(1 + max(part[:, KIND].max(initial=0), other[:, KIND].max(initial=0)), dtype=np.int64)
    np.add.at(added, other[:, KIND], other[:, SIZE])
    np.subtract.at(added, part[:, KIND], part[:, SIZE])
    kinds = np.flatnonzero(added)
    kinds = kinds[np.argsort(added[kinds])]
    return [_Insertion(len(part), np.stack([added[kinds] * count, kinds], axis=1), 1)]


def _match(part: IntArray, other: IntArray, resized: IntArray, count: int) -> list[_Insertion] | None:
    """Return the runs that `other` has and `part` lacks. Sizes in `resized` that depend on layers get `count` periods
    more."""
    insertions = list[_Insertion]()
    position = 0
    start = 0
    while True:
        length = min(len(part) - position, len(other) - start)
        differs = part[position : position + length, EXACT] != other[start : start + length, EXACT]
        agreed = int(differs.argmax()) if differs.any() else length
        position, start = position + agreed, start + agreed
        if position == len(part) and start == len(other):
            return insertions
        run = _inserted_length(part[position:], other[start:])
        if run is None:
            return None
        if run:
            insertions.append(_Insertion(position, other[start : start + run], count))
            start += run
        else:
            resized[position, SIZE] += count * (other[start, SIZE] - part[position, SIZE])
            position, start = position + 1, start + 1


def _inserted_length(rest: IntArray, other: IntArray) -> int | None:
    """Return the length of the run at the start of `other` behind which the two agree longest.

    It is 0 if the first entries differ in size only, and None if the two agree nowhere.
    """
    surplus = len(other) - len(rest)
    if not len(rest) or surplus < 0:
        return surplus if surplus > 0 else None
    best, length = None, 0
    for run in np.flatnonzero(other[: surplus + 1, ALIKE] == rest[0, ALIKE]).tolist():
        agreed = _count_agreeing(rest, other[run : run + len(rest)])
        if agreed > length:
            best, length = run, agreed
    return best if length >= min(SHORTEST, len(rest)) else None


def _count_agreeing(rest: IntArray, other: IntArray) -> int:
    """Return the number of entries, from the first one, that are equal; few sizes may depend on the number of layers.

    The two are of the same length.
    """
    resized = set[tuple[int, int]]()
    for index in np.flatnonzero(rest[:, EXACT] != other[:, EXACT]).tolist():
        resized.add((abs(int(rest[index, SIZE])), abs(int(other[index, SIZE]))))
        if rest[index, ALIKE] != other[index, ALIKE] or len(resized) > MAX_RESIZED:
            return int(index)
    return len(rest)


def _compose(entries: IntArray, insertions: Sequence[_Insertion]) -> IntArray:
    """Return the sizes and kinds of a part with its insertions."""
    pieces, done = list[IntArray](), 0
    for insertion in sorted(insertions, key=lambda insertion: insertion.position):
        pieces += [entries[done : insertion.position, :2], np.tile(insertion.entries[:, :2], (insertion.count, 1))]
        done = insertion.position
    return np.concatenate([*pieces, entries[done:, :2]])


def _is_possible(trace: MemoryTrace) -> bool:
    """Return True if no kind ever has less than 0 bytes."""
    return all(
        int(np.cumsum(trace.sizes[trace.kinds == kind]).min(initial=0)) >= 0 for kind in range(len(trace.kind_names))
    )
