"""Which queries meet which keys in a pack: planned once, used by every layer.

Attention over a pack falls into *levels*. At level 0 each segment attends to itself, causally. At level j each segment
attends to its j-th ancestor, all of whose tokens it sees. A segment that is shared is so met by all that descend from
it in one product. Results of the levels are merged by their log-sum-exps, which is exact.

Within a level, rows of like shape stand in one padded `Block`, so that a level costs few calls however many segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from etude.batch import Pack

__all__ = ["Block", "Meeting", "PaddedRows", "Plan"]

_WASTE = 0.2
"""How much shorter than the longest of its block a row may be: padding is work, and so is another call."""
_SLACK = 8
"""Rows that are at most so many tokens shorter always join."""


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """Packed tokens as padded rows [B, L]. Padding repeats a token of the row, so that its numbers are finite."""

    index: Tensor  # [B, L] int64: packed tokens
    real: Tensor | None  # [R] int64: places in the flat [B · L] that are not padding; None if all are
    tokens: Tensor  # [R] int64: the packed tokens that stand there
    lengths: Tensor  # [B] int64: of each row, without its padding
    span: tuple[int, int] | None  # where the rows are a plain stretch of the pack

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> PaddedRows:
        """Rows of token indices, padded to the longest."""
        longest = max(len(row) for row in rows)
        index = torch.stack([torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows])
        lengths = torch.tensor([len(row) for row in rows], device=index.device)
        full = bool((lengths == longest).all())
        kept = torch.arange(longest, device=index.device) < lengths[:, None]
        real = None if full else kept.flatten().nonzero()[:, 0]
        tokens = index.flatten() if real is None else index.flatten()[real]
        plain = full and bool((tokens.diff() == 1).all())
        span = (int(tokens[0]), int(tokens[-1]) + 1) if plain else None
        return cls(index, real, tokens, lengths, span)

    def take(self, x: Tensor) -> Tensor:
        """[P, …] → [B, L, …]: a view where the rows are a stretch of the pack."""
        shape = (*self.index.shape, *x.shape[1:])
        if self.span is not None:
            return x[self.span[0] : self.span[1]].view(shape)
        return x.index_select(0, self.index.flatten()).view(shape)

    def kept(self, x: Tensor) -> Tensor:
        """[B, L, …] → [R, …]: without the padding."""
        flat = x.flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)

    def padded(self, x: Tensor) -> Tensor:
        """[R, …] → [B, L, …]: `kept` undone, with zeros for padding."""
        shape = (*self.index.shape, *x.shape[1:])
        if self.real is None:
            return x.reshape(shape)
        return x.new_zeros(self.index.numel(), *x.shape[1:]).index_copy_(0, self.real, x).view(shape)

    def put(self, x: Tensor, into: Tensor) -> None:
        """[B, L, …] written to the packed tokens of [P, …]."""
        if self.span is not None:
            into[self.span[0] : self.span[1]] = x.flatten(0, 1)
        else:
            into.index_copy_(0, self.tokens, self.kept(x))

    def add(self, x: Tensor, into: Tensor) -> None:
        """[B, L, …] added to the packed tokens of [P, …]."""
        if self.span is not None:
            into[self.span[0] : self.span[1]] += x.flatten(0, 1)
        else:
            into.index_add_(0, self.tokens, self.kept(x).to(into.dtype))


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of queries against rows of keys."""

    level: int
    query: PaddedRows
    key: PaddedRows
    causal: bool
    """Whether query i sees keys 0 to i, and no others matter; otherwise it sees all that `mask` leaves."""
    mask: Tensor | None
    """[B, Lq, Lk] or [1, Lq, Lk] bool: what is seen; None is everything (or, if causal, everything up to itself)."""
    windowed: bool
    """Whether the mask does more than leave out padding."""


@dataclass(frozen=True, eq=False)
class Meeting:
    """A block with its rows, and how a query and a key make a score."""

    block: Block
    q: Tensor  # [B, Lq, Hq, D]
    k: Tensor  # [B, Lk, Hk, D]
    v: Tensor  # [B, Lk, Hk, D]
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, block: Block, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Meeting:
        """The rows of a block out of those of the pack, [P, H, D]."""
        return cls(block, block.query.take(q), block.key.take(k), block.key.take(v), scale, softcap)


class Plan:
    """The blocks of a pack."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        starts, self.parents = pack.offsets.tolist(), pack.parent.tolist()
        self._tokens = [torch.arange(a, b, device=pack.ids.device) for a, b in pairwise(starts)]
        self._depths: list[list[tuple[int, int]]] = self._ancestors()
        self._planned: dict[int | None, tuple[Block, ...]] = {}

    def blocks(self, window: int | None) -> tuple[Block, ...]:
        """All blocks, level by level. With a window, those in which nobody sees anything are left out."""
        if window not in self._planned:
            self._planned[window] = self._blocks(window)
        return self._planned[window]

    def _ancestors(self) -> list[list[tuple[int, int]]]:
        """For each level from 1 on, the pairs (segment, its ancestor of that level); empty segments left out."""
        levels: list[list[tuple[int, int]]] = []
        for segment in range(len(self.parents)):
            above, level = self.parents[segment], 0
            while above >= 0:
                if len(levels) == level:
                    levels.append([])
                if len(self._tokens[segment]) and len(self._tokens[above]):
                    levels[level].append((segment, above))
                above, level = self.parents[above], level + 1
        return levels

    def _blocks(self, window: int | None) -> tuple[Block, ...]:
        own = [tokens for tokens in self._tokens if len(tokens)]
        blocks = [self._own(rows, window) for rows in _alike([(tokens, tokens) for tokens in own])]
        for level, pairs in enumerate(self._depths, start=1):
            below: dict[int, list[Tensor]] = {}
            for segment, above in pairs:
                below.setdefault(above, []).append(self._tokens[segment])
            pairs_of_level = [(torch.cat(queries), self._tokens[above]) for above, queries in below.items()]
            across = [self._across(level, rows, window) for rows in _alike(pairs_of_level)]
            blocks += [block for block in across if block is not None]
        return tuple(blocks)

    def _own(self, rows: Sequence[tuple[Tensor, Tensor]], window: int | None) -> Block:
        gather = PaddedRows.of([tokens for tokens, _ in rows])
        longest = gather.index.shape[1]
        if window is None or longest <= window:
            return Block(0, gather, gather, True, None, False)
        back = torch.arange(longest, device=gather.index.device)
        distance = back[:, None] - back
        return Block(0, gather, gather, False, ((distance >= 0) & (distance < window))[None], True)

    def _across(self, level: int, rows: Sequence[tuple[Tensor, Tensor]], window: int | None) -> Block | None:
        query, key = PaddedRows.of([q for q, _ in rows]), PaddedRows.of([k for _, k in rows])
        seen, windowed = None, False
        if key.real is not None:
            seen = torch.zeros(key.index.numel(), dtype=torch.bool, device=key.index.device)
            seen[key.real] = True
            seen = seen.view(len(rows), 1, -1).expand(-1, query.index.shape[1], -1)
        if window is not None:
            positions = self.pack.positions
            near = positions[query.index][:, :, None] - positions[key.index][:, None, :] < window
            if not bool(near.all()):
                seen, windowed = near if seen is None else seen & near, True
        if seen is not None and not bool(seen.any()):
            return None
        return Block(level, query, key, False, seen, windowed)


def _alike(rows: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Rows of (queries, keys) in groups of about the same lengths, longest first; equal rows stay in order."""
    groups: list[list[tuple[Tensor, Tensor]]] = []
    longest = (0, 0)
    for row in sorted(rows, key=lambda row: (-len(row[1]), -len(row[0]))):
        shape = (len(row[0]), len(row[1]))
        if groups and all(
            (1 - _WASTE) * most - _SLACK <= length <= most for length, most in zip(shape, longest, strict=True)
        ):
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = shape
    return groups
