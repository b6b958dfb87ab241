"""The tokens of a step that attend together. It computes on small arrays; no tensor is touched.

A *chunk* is a run of consecutive tokens of one request. Chunks with similar numbers of queries and of keys form an
attention group, which is computed as one batched product. Shorter chunks are padded, within bounds. Chunks of one token
whose requests hold the same first blocks form a *prefix group*: their shared keys are fetched and attended once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_CHUNK = 128
"""The number of keys that are shared, and over which values are summed, at a time."""
CHUNK_TOKENS = 128
"""The most tokens of a prompt that attend at once. A chunk reads no keys behind its end."""

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The approximate size of an attention group. Larger groups are split."""

    fetch_bytes: int
    """The bytes of keys and values that a group fetches at once."""
    scores: int
    """The number of its scores."""


CPU_LIMITS = GroupLimits(fetch_bytes=16 << 20, scores=3 << 17)
"""The results of one product stay in the processor's cache until the next."""
GPU_LIMITS = GroupLimits(fetch_bytes=1 << 29, scores=1 << 27)
"""Starting a kernel takes longer than running it on a small group."""


@dataclass(frozen=True, slots=True)
class QueryChunks:
    """Chunks, column by column."""

    row: IntArray  # of its first token among the step's tokens
    count: IntArray
    end: IntArray  # the number of tokens of its context that its last token sees
    slot: IntArray
    reach: IntArray  # the number of tokens that any of its tokens sees: more than `end` within some images

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: Any) -> QueryChunks:
        return QueryChunks(self.row[index], self.count[index], self.end[index], self.slot[index], self.reach[index])


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """F prefix groups of U chunks. Chunks that share nothing are prefix groups of one."""

    chunks: QueryChunks  # F · U of them, one prefix group after the other
    real: NDArray[np.bool_]  # [F · U]: false for a chunk that pads a smaller prefix group
    prefix_groups: int
    prefix_length: int
    """The number of tokens that the chunks of a prefix group share at the beginning: a multiple of `KEY_CHUNK`."""


def split_into_chunks(
    row: IntArray,
    start: IntArray,
    stop: IntArray,
    slot: IntArray,
    max_tokens: int = CHUNK_TOKENS,
    reach: IntArray | None = None,
) -> QueryChunks:
    """Split the tokens `start` to `stop` of contexts into chunks of at most `max_tokens`.

    reach: the number of tokens that each row sees, if some see later ones.
    """
    num_chunks = -(-(stop - start) // max_tokens)
    source = np.repeat(np.arange(len(row)), num_chunks)
    offset = (np.arange(len(source)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)) * max_tokens
    count = np.minimum(stop[source] - start[source] - offset, max_tokens)
    first = row[source] + offset
    end = start[source] + offset + count
    longest = end
    if reach is not None:
        longest = np.array([reach[a : a + n].max() for a, n in zip(first.tolist(), count.tolist(), strict=True)])
    return QueryChunks(first, count, end, slot[source], longest)


def group_chunks(
    chunks: QueryChunks,
    table: IntArray,
    *,
    size: int,
    block_bytes: int,
    heads: int,
    allow_prefix_groups: bool = True,
    limits: GroupLimits = CPU_LIMITS,
) -> Iterator[AttentionGroup]:
    """Put every chunk into one attention group. It forms prefix groups only with `allow_prefix_groups`.

    `table` has the blocks of each slot, of `size` tokens. A block has `block_bytes` bytes in one layer.
    """
    ungrouped = np.ones(len(chunks), dtype=bool)
    for groups, shared in _find_prefix_groups(chunks, table, size) if allow_prefix_groups else ():
        group_size = max(len(group) for group in groups)
        padded = np.array([group + group[-1:] * (group_size - len(group)) for group in groups])
        real = np.arange(group_size) < np.array([len(group) for group in groups])[:, None]
        own_keys = int(chunks.reach[padded].max()) - shared
        num_bytes = block_bytes * (shared + group_size * own_keys) // size
        scores = group_size * (shared + own_keys) * heads
        max_groups = max(1, min(limits.fetch_bytes // num_bytes, limits.scores // scores))
        for start in range(0, len(groups), max_groups):
            part = padded[start : start + max_groups]
            yield AttentionGroup(
                chunks[part.reshape(-1)], real[start : start + max_groups].reshape(-1), len(part), shared
            )
        ungrouped[padded] = False
    rest = np.flatnonzero(ungrouped)
    order = rest[np.lexsort((chunks.row[rest], chunks.reach[rest], chunks.count[rest]))]
    blocks = -(-chunks.reach[order] // size)
    for start, end in _split_by_padding(
        chunks.count[order].tolist(),
        blocks.tolist(),
        max(1, limits.fetch_bytes // block_bytes),
        max(1, limits.scores // (size * heads)),
    ):
        yield AttentionGroup(chunks[order[start:end]], np.ones(end - start, dtype=bool), end - start, 0)


def _find_prefix_groups(chunks: QueryChunks, table: IntArray, size: int) -> Iterator[tuple[list[list[int]], int]]:
    """Yield prefix groups of similar size that share as many keys, and that number of keys.

    Each chunk is in the prefix group in which it shares most.
    """
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
    """Yield runs of sorted chunks with little padding: at most a quarter, unless the run is small.

    A run has at most `max_blocks` blocks, and at most `max_products` pairs of queries and blocks.
    """
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
