"""Which tokens of a step attend together. Bookkeeping over small arrays; no tensor is touched.

A *piece* is a run of consecutive tokens of one request. Pieces of like numbers of queries and of keys form a group,
which is computed as one batched product; what is shorter is padded, within bounds. Pieces of one token whose requests
hold the same first blocks form a *family*: what they share is fetched and attended once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["KEYS", "AttentionGroup", "QueryChunks", "group_chunks", "split_into_chunks"]

KEYS = 128
"""Keys are shared, and values summed, by so many at a time."""
CHUNK_TOKENS = 128
"""Prompts attend in pieces of so many tokens: a piece reads no keys behind its end."""
FETCH = 16 << 20
"""A group is split so that it fetches about so many bytes at once,"""
SCORES = 3 << 17
"""and has about so many scores: what is made for one product stays in the processor's cache until the next."""

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueryChunks:
    """Pieces, column by column."""

    row: IntArray  # of its first token in the flat list of the step's tokens
    count: IntArray
    end: IntArray  # how many tokens of its context its last token sees
    slot: IntArray

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, which: Any) -> QueryChunks:
        return QueryChunks(self.row[which], self.count[which], self.end[which], self.slot[which])


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """F families of U pieces; those that share nothing are families of one."""

    chunks: QueryChunks  # F · U of them, family by family
    real: NDArray[np.bool_]  # [F · U]: whether a piece is one, or fills up a smaller family
    prefix_groups: int
    prefix_length: int
    """How many tokens at the beginning of their contexts the pieces of a family share: a multiple of `KEYS`."""


def split_into_chunks(
    row: IntArray, start: IntArray, stop: IntArray, slot: IntArray, piece: int = CHUNK_TOKENS
) -> QueryChunks:
    """The pieces of runs of tokens `start` to `stop` of contexts, the long ones cut."""
    parts = -(-(stop - start) // piece)
    which = np.repeat(np.arange(len(row)), parts)
    ahead = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * piece
    count = np.minimum(stop[which] - start[which] - ahead, piece)
    return QueryChunks(row[which] + ahead, count, start[which] + ahead + count, slot[which])


def group_chunks(
    chunks: QueryChunks, table: IntArray, *, size: int, block_bytes: int, heads: int, shares: bool = True
) -> Iterator[AttentionGroup]:
    """Every piece in one group, in families only if it `shares`. `table` has each slot's blocks of `size` tokens, of
    `block_bytes` in one layer."""
    alone = np.ones(len(chunks), dtype=bool)
    for members, shared in _find_prefix_groups(chunks, table, size) if shares else ():
        widest = max(len(family) for family in members)
        filled = np.array([family + family[-1:] * (widest - len(family)) for family in members])
        real = np.arange(widest) < np.array([len(family) for family in members])[:, None]
        own = int(chunks.end[filled].max()) - shared
        bytes_, scores = block_bytes * (shared + widest * own) // size, widest * (shared + own) * heads
        most = max(1, min(FETCH // bytes_, SCORES // scores))
        for begin in range(0, len(members), most):
            part = filled[begin : begin + most]
            yield AttentionGroup(chunks[part.reshape(-1)], real[begin : begin + most].reshape(-1), len(part), shared)
        alone[filled] = False
    left = np.flatnonzero(alone)
    order = left[np.lexsort((chunks.row[left], chunks.end[left], chunks.count[left]))]
    blocks = -(-chunks.end[order] // size)
    for begin, end in _split_by_padding(
        chunks.count[order].tolist(), blocks.tolist(), FETCH // block_bytes, SCORES // (size * heads)
    ):
        yield AttentionGroup(chunks[order[begin:end]], np.ones(end - begin, dtype=bool), end - begin, 0)


def _find_prefix_groups(chunks: QueryChunks, table: IntArray, size: int) -> Iterator[tuple[list[list[int]], int]]:
    """Families of like size that share as many keys, and how many. Each piece is in the one where it shares most."""
    if KEYS % size or not bool(((chunks.count == 1) & (chunks.end > KEYS)).sum() > 1):
        return
    single = np.flatnonzero((chunks.count == 1) & (chunks.end > KEYS))
    deep = np.arange(1, int(chunks.end[single].max() - 1) // KEYS + 1)
    marks = table[chunks.slot[single]][:, deep * (KEYS // size) - 1]  # the last block of each run of KEYS
    inside = deep * KEYS < chunks.end[single][:, None]
    _, where, holders = np.unique(np.where(inside, marks, -1), return_inverse=True, return_counts=True)
    common = (holders[where.reshape(marks.shape)] > 1) & inside
    depth = np.where(common, deep, 0).max(1)
    by_block: dict[tuple[int, int], list[int]] = defaultdict(list)
    for piece, level, row in zip(single.tolist(), depth.tolist(), marks, strict=True):
        if level:
            by_block[level, int(row[level - 1])].append(piece)
    alike: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for (level, _), family in by_block.items():
        if len(family) > 1:
            alike[level, len(family).bit_length()].append(family)
    for (level, _), members in alike.items():
        yield members, level * KEYS


def _split_by_padding(counts: list[int], blocks: list[int], most: int, products: int) -> Iterator[tuple[int, int]]:
    """Runs of sorted pieces with little padding: at most a quarter unless it is small, at most `most` blocks, and at
    most `products` of queries and blocks."""
    begin = real = 0
    for place in range(len(counts)):
        padded = (place - begin + 1) * max(blocks[place], blocks[begin])
        wasteful = (padded - real - blocks[place]) * 4 > padded and padded * 8 > most
        large = padded > most or padded * counts[place] > products
        if place > begin and (large or wasteful or counts[place] > 2 * counts[begin]):
            yield begin, place
            begin, real = place, 0
        real += blocks[place]
    if counts:
        yield begin, len(counts)
