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

__all__ = ["KEY_CHUNK", "AttentionGroup", "QueryChunks", "group_chunks", "split_into_chunks"]

KEY_CHUNK = 128
"""Keys are shared, and values summed, by so many at a time."""
CHUNK_TOKENS = 128
"""Prompts attend in pieces of so many tokens: a piece reads no keys behind its end."""
MAX_FETCH_BYTES = 16 << 20
"""A group is split so that it fetches about so many bytes at once,"""
MAX_SCORES = 3 << 17
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

    def __getitem__(self, index: Any) -> QueryChunks:
        return QueryChunks(self.row[index], self.count[index], self.end[index], self.slot[index])


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """F families of U pieces; those that share nothing are families of one."""

    chunks: QueryChunks  # F · U of them, family by family
    real: NDArray[np.bool_]  # [F · U]: whether a piece is one, or fills up a smaller family
    prefix_groups: int
    prefix_length: int
    """How many tokens at the beginning of their contexts the pieces of a family share: a multiple of `KEYS`."""


def split_into_chunks(
    row: IntArray, start: IntArray, stop: IntArray, slot: IntArray, max_tokens: int = CHUNK_TOKENS
) -> QueryChunks:
    """The pieces of runs of tokens `start` to `stop` of contexts, the long ones cut."""
    num_chunks = -(-(stop - start) // max_tokens)
    source = np.repeat(np.arange(len(row)), num_chunks)
    offset = (np.arange(len(source)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)) * max_tokens
    count = np.minimum(stop[source] - start[source] - offset, max_tokens)
    return QueryChunks(row[source] + offset, count, start[source] + offset + count, slot[source])


def group_chunks(
    chunks: QueryChunks, table: IntArray, *, size: int, block_bytes: int, heads: int, allow_prefix_groups: bool = True
) -> Iterator[AttentionGroup]:
    """Every piece in one group, in families only if it `shares`. `table` has each slot's blocks of `size` tokens, of
    `block_bytes` in one layer."""
    ungrouped = np.ones(len(chunks), dtype=bool)
    for groups, shared in _find_prefix_groups(chunks, table, size) if allow_prefix_groups else ():
        group_size = max(len(group) for group in groups)
        padded = np.array([group + group[-1:] * (group_size - len(group)) for group in groups])
        real = np.arange(group_size) < np.array([len(group) for group in groups])[:, None]
        own_keys = int(chunks.end[padded].max()) - shared
        num_bytes = block_bytes * (shared + group_size * own_keys) // size
        scores = group_size * (shared + own_keys) * heads
        max_groups = max(1, min(MAX_FETCH_BYTES // num_bytes, MAX_SCORES // scores))
        for start in range(0, len(groups), max_groups):
            part = padded[start : start + max_groups]
            yield AttentionGroup(
                chunks[part.reshape(-1)], real[start : start + max_groups].reshape(-1), len(part), shared
            )
        ungrouped[padded] = False
    rest = np.flatnonzero(ungrouped)
    order = rest[np.lexsort((chunks.row[rest], chunks.end[rest], chunks.count[rest]))]
    blocks = -(-chunks.end[order] // size)
    for start, end in _split_by_padding(
        chunks.count[order].tolist(), blocks.tolist(), MAX_FETCH_BYTES // block_bytes, MAX_SCORES // (size * heads)
    ):
        yield AttentionGroup(chunks[order[start:end]], np.ones(end - start, dtype=bool), end - start, 0)


def _find_prefix_groups(chunks: QueryChunks, table: IntArray, size: int) -> Iterator[tuple[list[list[int]], int]]:
    """Families of like size that share as many keys, and how many. Each piece is in the one where it shares most."""
    if KEY_CHUNK % size or not bool(((chunks.count == 1) & (chunks.end > KEY_CHUNK)).sum() > 1):
        return
    decoding = np.flatnonzero((chunks.count == 1) & (chunks.end > KEY_CHUNK))
    depths = np.arange(1, int(chunks.end[decoding].max() - 1) // KEY_CHUNK + 1)
    last_columns = depths * (KEY_CHUNK // size) - 1  # of the last block in each run of KEY_CHUNK keys
    last_blocks = table[chunks.slot[decoding]][:, last_columns]
    inside = depths * KEY_CHUNK < chunks.end[decoding][:, None]
    _, inverse, counts = np.unique(np.where(inside, last_blocks, -1), return_inverse=True, return_counts=True)
    shared = (counts[inverse.reshape(last_blocks.shape)] > 1) & inside
    depth = np.where(shared, depths, 0).max(1)
    by_block: dict[tuple[int, int], list[int]] = defaultdict(list)
    for chunk, chunk_depth, row in zip(decoding.tolist(), depth.tolist(), last_blocks, strict=True):
        if chunk_depth:
            by_block[chunk_depth, int(row[chunk_depth - 1])].append(chunk)
    by_size: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for (chunk_depth, _), group in by_block.items():
        if len(group) > 1:
            by_size[chunk_depth, len(group).bit_length()].append(group)
    for (chunk_depth, _), groups in by_size.items():
        yield groups, chunk_depth * KEY_CHUNK


def _split_by_padding(
    counts: list[int], blocks: list[int], max_blocks: int, max_products: int
) -> Iterator[tuple[int, int]]:
    """Runs of sorted pieces with little padding: at most a quarter unless it is small, at most `most` blocks, and at
    most `products` of queries and blocks."""
    start = real = 0
    for index in range(len(counts)):
        padded = (index - start + 1) * max(blocks[index], blocks[start])
        wasteful = (padded - real - blocks[index]) * 4 > padded and padded * 8 > max_blocks
        large = padded > max_blocks or padded * counts[index] > max_products
        if index > start and (large or wasteful or counts[index] > 2 * counts[start]):
            yield start, index
            start, real = index, 0
        real += blocks[index]
    if counts:
        yield start, len(counts)
