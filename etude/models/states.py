"""Recurrences over a tree of segments: each segment begins with the state in which its parent ended.

    root ──► state ──┬──► answer 1          level 0: all roots, in few padded calls of the layer's own function
                     └──► answer 2          level 1: all segments that continue them, …

A shared prompt is computed once. Each of its continuations reads its state, so their gradients add up in it. In an
engine the roots begin with states that are kept in slots, and segments leave their states there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.models.blocks import PaddedRows, group_alike

NO_SLOT = -1
"""The slot of a state that is zero."""

Rows = tuple[Tensor, ...]
"""The inputs of a recurrence: of tokens [P, …], or as padded rows [B, L, …]."""


@dataclass(frozen=True)
class Recurrence:
    """A recurrence as a layer calls it, over padded rows."""

    run: Callable[[Rows, Tensor | None], tuple[Tensor, Tensor]]
    """[B, L, …] of each input, and [B, …] the first state or None for zero → [B, L, …] outputs, [B, …] last states."""
    step: Callable[[Rows, Tensor], tuple[Tensor, Tensor]] | None
    """The same for rows of one token that begin with a state; None if `run` is as good."""
    neutral: tuple[int, ...]
    """The inputs that are zero where a token must not change the state."""
    products: int
    """The multiplications with each number of the state for a token: by a key, a value or a query."""


class SlotMemory:
    """The states of all slots in one layer; allocated when the first is written."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.states: Tensor | None = None

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Store these states in these slots."""
        if self.states is None:
            self.states = values.new_zeros(self.slots, *values.shape[1:])
        self.states.index_copy_(0, slots, values.to(self.states.dtype))


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a recurrence: rows of one level, of similar lengths."""

    rows: PaddedRows
    padding: Tensor | None  # [B, L] bool
    begins: Tensor | None  # [B] int64: where the first states are; None if all are zero
    from_zero: Tensor | None  # [B] bool: the rows whose first state is zero; None for no row
    ends: Tensor | None  # [n] int64: the rows whose last states are read later
    is_step: bool

    def inputs(self, recurrence: Recurrence, inputs: Rows) -> Rows:
        """Gather the rows, such that padding does not change a state."""
        rows = tuple(self.rows.take(x) for x in inputs)
        if self.padding is None:
            return rows
        return tuple(
            x.masked_fill(_over(self.padding, x), 0) if index in recurrence.neutral else x
            for index, x in enumerate(rows)
        )

    def first_states(self, table: Tensor | None) -> Tensor | None:
        """Return the states with which the rows begin."""
        if self.begins is None:
            return None
        assert table is not None, "a state is read after it was written"
        states = table.index_select(0, self.begins)
        return states if self.from_zero is None else states.masked_fill(_over(self.from_zero, states), 0)


@dataclass(frozen=True)
class _Level:
    """The calls whose rows begin with states of the level before, and what is kept of their last states."""

    calls: list[_Call]
    places: dict[int, int]
    """The place of each segment among the kept states of this level."""
    written: tuple[Tensor, Tensor] | None
    """[n], [n] int64: kept states, and the slots that get them."""


class StateTree:
    """The segments of a pass, in the order in which a recurrence goes through them."""

    def __init__(
        self,
        offsets: Sequence[int],
        parents: Sequence[int],
        device: torch.device,
        *,
        reads: Sequence[int] = (),
        writes: Sequence[Sequence[int]] = (),
        steps: Sequence[bool] = (),
    ) -> None:
        """reads: the slot whose state each root begins with. writes: the slots that get each segment's last state.

        steps: the segments of one token that `Recurrence.step` computes, which are an engine's drawn tokens.
        """
        count = len(parents)
        self._device = device
        self._parents = list(parents)
        self._total = offsets[-1]
        self._tokens = torch.arange(self._total, device=device)
        self._spans = list(pairwise(offsets))
        self._reads = list(reads) or [NO_SLOT] * count
        self._writes = [tuple(slots) for slots in writes] or [()] * count
        self._steps = list(steps) or [False] * count
        self._sources, self._depths = self._find_sources()
        self._levels: list[_Level] | None = None
        self._tails: dict[int, _Tails] = {}

    def scan(self, recurrence: Recurrence, inputs: Rows, memory: SlotMemory | None = None) -> Tensor:
        """[P, …] of each input → [P, …]: the outputs of all tokens.

        memory: holds the states that roots begin with, and gets those that are written, after all were read.
        """
        if self._levels is None:
            self._levels = self._plan_levels()
        parts: list[Tensor] = []
        to_write: list[tuple[Tensor, Tensor]] = []
        table = None if memory is None else memory.states
        for level in self._levels:
            kept: list[Tensor] = []
            for call in level.calls:
                first = call.first_states(table)
                one = recurrence.step if call.is_step and first is not None else None
                rows = call.inputs(recurrence, inputs)
                out, last = recurrence.run(rows, first) if one is None or first is None else one(rows, first)
                parts.append(call.rows.kept(out))
                if call.ends is not None:
                    kept.append(last.index_select(0, call.ends))
            table = torch.cat(kept) if kept else None
            if level.written is not None and table is not None:
                places, slots = level.written
                to_write.append((slots, table.index_select(0, places)))
        if memory is not None:
            for slots, states in to_write:
                memory.write(slots, states)
        return torch.cat(parts).index_select(0, self._inverse)

    def convolve(
        self, run: Callable[[Tensor], Tensor], x: Tensor, width: int, memory: SlotMemory | None = None
    ) -> Tensor:
        """[C, P] → [C, P]: a causal convolution, each segment after the `width` tokens before it on its path.

        memory: [slots, width, C], the last inputs of requests.
        """
        if width not in self._tails:
            self._tails[width] = self._plan_tails(width)
        tails = self._tails[width]
        parts = [x, x.new_zeros(x.shape[0], 1)]
        if memory is not None and len(tails.read):
            assert memory.states is not None, "a state is read after it was written"
            parts.append(memory.states.index_select(0, tails.read).flatten(0, 1).T.to(x.dtype))
        source = torch.cat(parts, 1)
        out = run(source.index_select(1, tails.extended)).index_select(1, tails.own)
        if memory is not None and len(tails.slots):
            kept = source.index_select(1, tails.last).T
            memory.write(tails.slots, kept.view(len(tails.slots), width, -1))
        return out

    # -- plans --------------------------------------------------------------------------------------------------------

    def _find_sources(self) -> tuple[list[int], list[int]]:
        """Return, for each segment, the one whose last state is its own (−1 for zero), and its level.

        The state of an empty segment is its parent's.
        """
        sources: list[int] = []
        depths: list[int] = []
        for segment, (start, stop) in enumerate(self._spans):
            origin = self._origin(segment, sources)
            sources.append(segment if stop > start else origin)
            depths.append(depths[origin] + 1 if origin >= 0 else 0)
        return sources, depths

    def _origin(self, segment: int, sources: Sequence[int]) -> int:
        """Return the segment with whose last state this one begins; −1 for none."""
        parent = self._parents[segment]
        return sources[parent] if parent >= 0 else NO_SLOT

    def _plan_levels(self) -> list[_Level]:
        real = [segment for segment, (start, stop) in enumerate(self._spans) if stop > start]
        needed = {self._origin(segment, self._sources) for segment in real}
        needed |= {self._sources[segment] for segment, slots in enumerate(self._writes) if slots}
        levels: list[_Level] = []
        for depth in range(1 + max((self._depths[segment] for segment in real), default=-1)):
            members = [segment for segment in real if self._depths[segment] == depth]
            places: dict[int, int] = {}
            calls = []
            for group in self._group(members):
                begins = self._begins(group, levels[-1].places if levels else None)
                ends = [row for row, segment in enumerate(group) if segment in needed]
                calls.append(self._call(group, begins, ends))
                for row in ends:
                    places[group[row]] = len(places)
            levels.append(_Level(calls, places, self._written(places)))
        order = [call.rows.tokens for level in levels for call in level.calls]
        self._inverse = torch.empty(self._total, dtype=torch.int64, device=self._device)
        if order:
            self._inverse[torch.cat(order)] = self._tokens
        return levels

    def _group(self, members: Sequence[int]) -> list[list[int]]:
        """Group segments by similar lengths. Drawn tokens are a group of their own, and never padded."""
        longer = [segment for segment in members if not self._steps[segment]]
        lengths = [(self._spans[segment][1] - self._spans[segment][0],) for segment in longer]
        steps = [segment for segment in members if self._steps[segment]]
        return [[longer[index] for index in group] for group in group_alike(lengths)] + ([steps] if steps else [])

    def _begins(self, group: Sequence[int], places: dict[int, int] | None) -> list[int]:
        """Return where the first states of these segments are: among the slots, or among the level before."""
        if places is None:
            return [self._reads[segment] for segment in group]
        return [places[self._origin(segment, self._sources)] for segment in group]

    def _call(self, group: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> _Call:
        rows = PaddedRows.of([self._tokens[slice(*self._spans[segment])] for segment in group])
        padding = None
        if rows.real is not None:
            padding = torch.ones(rows.index.numel(), dtype=torch.bool, device=self._device)
            padding[rows.real] = False
            padding = padding.view(rows.index.shape)
        where = self._tensor(begins)
        some_zero = min(begins) < 0
        return _Call(
            rows,
            padding,
            begins=None if max(begins) < 0 else where.clamp(min=0),
            from_zero=where < 0 if some_zero and max(begins) >= 0 else None,
            ends=self._tensor(ends) if ends else None,
            is_step=self._steps[group[0]],
        )

    def _written(self, places: dict[int, int]) -> tuple[Tensor, Tensor] | None:
        pairs = [
            (places[source], slot)
            for source, slots in zip(self._sources, self._writes, strict=True)
            for slot in slots
            if source in places
        ]
        if not pairs:
            return None
        return self._tensor([place for place, _ in pairs]), self._tensor([slot for _, slot in pairs])

    def _plan_tails(self, width: int) -> _Tails:
        """Return the tokens of all segments, each segment after the `width` tokens before it.

        Index P is a token of zeros; behind it come the kept tokens of the slots that are read.
        """
        read = sorted({slot for slot in self._reads if slot >= 0})
        first_kept = {slot: self._total + 1 + index * width for index, slot in enumerate(read)}
        tails: list[NDArray[np.int64]] = []
        extended: list[NDArray[np.int64]] = []
        own: list[NDArray[np.int64]] = []
        length = 0
        for segment, (start, stop) in enumerate(self._spans):
            slot = self._reads[segment]
            if self._parents[segment] >= 0:
                before = tails[self._parents[segment]]
            elif slot >= 0:
                before = np.arange(first_kept[slot], first_kept[slot] + width)
            else:
                before = np.full(width, self._total)
            path = np.concatenate([before, np.arange(start, stop)])
            extended.append(path)
            own.append(np.arange(length + width, length + len(path)))
            length += len(path)
            tails.append(path[len(path) - width :])
        slots = [slot for written in self._writes for slot in written]
        last = [tails[segment] for segment, written in enumerate(self._writes) for _ in written]
        return _Tails(
            extended=torch.from_numpy(np.concatenate(extended)).to(self._device),
            own=torch.from_numpy(np.concatenate(own)).to(self._device),
            read=self._tensor(read),
            last=torch.from_numpy(np.concatenate(last)).to(self._device) if last else self._tensor([]),
            slots=self._tensor(slots),
        )

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)


@dataclass(frozen=True, eq=False)
class _Tails:
    """The tokens that a convolution of one width reads, as indices."""

    extended: Tensor  # all segments, each after the tokens before it
    own: Tensor  # [P] the segments' own tokens among them
    read: Tensor  # the slots whose kept tokens are read
    last: Tensor  # the tokens that slots keep
    slots: Tensor  # the slots that get them


def _over(mask: Tensor, x: Tensor) -> Tensor:
    """Return a mask of the first dimensions of `x`, ready to be applied to it."""
    return mask.view(*mask.shape, *[1] * (x.dim() - mask.dim()))
