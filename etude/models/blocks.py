"""The attention plan of a pack: the queries and keys of each block, planned once and used by every layer.

Attention over a pack has *levels*. At level 0 each segment attends to itself, causally. At level j each segment attends
to all tokens of its j-th ancestor. So all descendants attend to a shared segment in one product. The results of the
levels are merged by their log-sum-exps, which is exact.

Within a level, rows of similar shape form one padded `Block`, so that a level costs few calls for any number of
segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from etude.batch import Pack

_WASTE = 0.2
"""The share by which a row may be shorter than the longest of its block: padding costs time, as does another call."""
_SLACK = 8
"""A row that is shorter by at most this many tokens always joins the block."""

Pair = tuple[int, int]
"""A segment and one of its ancestors."""


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """Packed tokens as padded rows [B, L]. Padding repeats a token of the row, so that its numbers are finite."""

    index: Tensor  # [B, L] int64: packed tokens
    real: Tensor | None  # [R] int64: indices in the flat [B · L] that are not padding; None without padding
    tokens: Tensor  # [R] int64: the packed tokens at those indices
    lengths: Tensor  # [B] int64: of each row, without its padding
    span: tuple[int, int] | None  # start and end in the pack, if the rows are consecutive tokens

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> PaddedRows:
        """Build padded rows from rows of token indices."""
        counts = [len(row) for row in rows]
        longest = max(counts)
        index = torch.stack(
            [
                row if count == longest else torch.cat([row, row[-1:].expand(longest - count)])
                for row, count in zip(rows, counts, strict=True)
            ]
        )
        lengths = torch.tensor(counts, device=index.device)
        full = bool((lengths == longest).all())
        kept = torch.arange(longest, device=index.device) < lengths[:, None]
        real = None if full else kept.flatten().nonzero()[:, 0]
        tokens = index.flatten() if real is None else index.flatten()[real]
        plain = full and bool((tokens.diff() == 1).all())
        span = (int(tokens[0]), int(tokens[-1]) + 1) if plain else None
        return cls(index, real, tokens, lengths, span)

    def take(self, x: Tensor) -> Tensor:
        """[P, …] → [B, L, …]: gather the rows; a view if they are consecutive tokens of the pack."""
        shape = (*self.index.shape, *x.shape[1:])
        if self.span is not None:
            return x[self.span[0] : self.span[1]].view(shape)
        return x.index_select(0, self.index.flatten()).view(shape)

    def kept(self, x: Tensor) -> Tensor:
        """[B, L, …] → [R, …]: remove the padding."""
        flat = x.flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)

    def padded(self, x: Tensor) -> Tensor:
        """[R, …] → [B, L, …]: the inverse of `kept`, with zeros for padding."""
        shape = (*self.index.shape, *x.shape[1:])
        if self.real is None:
            return x.reshape(shape)
        return x.new_zeros(self.index.numel(), *x.shape[1:]).index_copy_(0, self.real, x).view(shape)

    def read(self, x: Tensor) -> Tensor:
        """[P, …] → [R, …]: gather the tokens without padding; a view if they are consecutive."""
        return x[self.span[0] : self.span[1]] if self.span is not None else x.index_select(0, self.tokens)

    def write(self, x: Tensor, into: Tensor) -> None:
        """Write [R, …] to the packed tokens of [P, …]."""
        if self.span is not None:
            into[self.span[0] : self.span[1]] = x
        else:
            into.index_copy_(0, self.tokens, x)

    def add(self, x: Tensor, into: Tensor) -> None:
        """Add [R, …] to the packed tokens of [P, …]."""
        if self.span is not None:
            into[self.span[0] : self.span[1]] += x
        else:
            into.index_add_(0, self.tokens, x.to(into.dtype))


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of queries, and the rows of keys that they attend to."""

    level: int
    query: PaddedRows
    key: PaddedRows
    causal: bool
    """True if query i sees keys 0 to i; otherwise it sees the keys that `mask` allows."""
    mask: Tensor | None
    """[B, Lq, Lk] or [1, Lq, Lk] bool: true where seen; None allows every key (if causal, every key up to itself)."""
    windowed: bool
    """True if the mask hides more than padding."""


@dataclass(frozen=True, eq=False)
class BlockInputs:
    """A block with its rows of q, k and v, and the options of its scores."""

    block: Block
    q: Tensor  # [B, Lq, Hq, D]
    k: Tensor  # [B, Lk, Hk, D]
    v: Tensor  # [B, Lk, Hk, D]
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, block: Block, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> BlockInputs:
        """Gather the rows of a block from those of the pack, [P, H, D]."""
        return cls(block, block.query.take(q), block.key.take(k), block.key.take(v), scale, softcap)


class Plan:
    """The blocks of a pack."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        starts = pack.offsets.tolist()
        self.parents = pack.parent.tolist()
        self._tokens = [torch.arange(a, b, device=pack.ids.device) for a, b in pairwise(starts)]
        self._levels = ancestors_by_level(self.parents, [len(tokens) for tokens in self._tokens])
        self._planned: dict[int | None, tuple[Block, ...]] = {}

    def blocks(self, window: int | None) -> tuple[Block, ...]:
        """Return all blocks, level by level. With a window, blocks in which no query sees a key are left out."""
        if window not in self._planned:
            self._planned[window] = self._blocks(window)
        return self._planned[window]

    def across(self, level: int, pairs: Sequence[Pair], window: int | None) -> list[Block]:
        """Return the blocks in which segments attend to their ancestors, given as (segment, ancestor)."""
        rows = [
            (torch.cat([self._tokens[segment] for segment in members]), self._tokens[ancestor])
            for ancestor, members in group_by_ancestor(pairs).items()
        ]
        blocks = [self._across(level, alike, window) for alike in _alike(rows)]
        return [block for block in blocks if block is not None]

    def _blocks(self, window: int | None) -> tuple[Block, ...]:
        counts = len(self.pack.both_ways) and not (self.pack.in_windows and window is None)
        both_ways = self.pack.both_ways.tolist() if counts else [False] * len(self._tokens)
        own = [tokens for tokens, both in zip(self._tokens, both_ways, strict=True) if len(tokens) and not both]
        blocks = [self._own(rows, window) for rows in _alike([(tokens, tokens) for tokens in own])]
        whole = [(tokens, tokens) for tokens, both in zip(self._tokens, both_ways, strict=True) if len(tokens) and both]
        blocks += [_whole(rows, window if self.pack.in_windows else None) for rows in _alike(whole)]
        for level, pairs in enumerate(self._levels, start=1):
            blocks += self.across(level, pairs, window)
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
        seen, windowed = _seen_keys(query, key), False
        if window is not None:
            positions = self.pack.positions
            near = positions[query.index][:, :, None] - positions[key.index][:, None, :] < window
            if not bool(near.all()):
                seen, windowed = near if seen is None else seen & near, True
        if seen is not None and not bool(seen.any()):
            return None
        return Block(level, query, key, False, seen, windowed)


def _whole(rows: Sequence[tuple[Tensor, Tensor]], window: int | None) -> Block:
    """Return the block of segments that attend both ways. window: beyond it no earlier token is seen."""
    gather = PaddedRows.of([tokens for tokens, _ in rows])
    seen = _seen_keys(gather, gather)
    longest = gather.index.shape[1]
    if window is None or longest <= window:
        return Block(0, gather, gather, False, seen, False)
    back = torch.arange(longest, device=gather.index.device)
    near = (back[:, None] - back < window)[None]
    return Block(0, gather, gather, False, near if seen is None else seen & near, True)


def _seen_keys(query: PaddedRows, key: PaddedRows) -> Tensor | None:
    """[B, Lq, Lk] bool: return the keys that are no padding; None if none is."""
    if key.real is None:
        return None
    seen = torch.zeros(key.index.numel(), dtype=torch.bool, device=key.index.device)
    seen[key.real] = True
    return seen.view(len(key.index), 1, -1).expand(-1, query.index.shape[1], -1)


def ancestors_by_level(parents: Sequence[int], lengths: Sequence[int]) -> list[list[Pair]]:
    """Return, for each level from 1 on, the pairs (segment, its ancestor of that level), without empty segments."""
    levels: list[list[Pair]] = []
    for segment in range(len(parents)):
        above, level = parents[segment], 0
        while above >= 0:
            if len(levels) == level:
                levels.append([])
            if lengths[segment] and lengths[above]:
                levels[level].append((segment, above))
            above, level = parents[above], level + 1
    return levels


def group_by_ancestor(pairs: Sequence[Pair]) -> dict[int, list[int]]:
    """Return the segments below each ancestor, in order."""
    below: dict[int, list[int]] = {}
    for segment, ancestor in pairs:
        below.setdefault(ancestor, []).append(segment)
    return below


def _alike(rows: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Group rows of (queries, keys) by similar lengths."""
    lengths = [(len(keys), len(queries)) for queries, keys in rows]
    return [[rows[index] for index in group] for group in group_alike(lengths)]


def group_alike(lengths: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Group rows whose lengths are all similar, longest first; equal rows stay in order. Return their indices."""
    groups: list[list[int]] = []
    longest: tuple[int, ...] = ()
    for index in sorted(range(len(lengths)), key=lambda index: tuple(-length for length in lengths[index])):
        own = lengths[index]
        if groups and all(
            (1 - _WASTE) * most - _SLACK <= length <= most for length, most in zip(own, longest, strict=True)
        ):
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = own
    return groups
