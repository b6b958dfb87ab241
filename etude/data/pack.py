"""Micro-batches within a token budget, and the prefix tree of segments that holds each shared prompt once.

Rollouts of a group begin with the same prompt. As separate rows, each computes it again. In a tree it is computed once,
and its completions are below it::

    rows      P P P A A     P P P B     P P P C C C          14 tokens
    tree      P P P ─┬─ A A                                   9 tokens, and the budget counts these
                     ├─ B
                     └─ C C C

Two rows share the common prefix of their contexts, which are the tokens before the first action. The hidden state of a
token depends only on the tokens up to it. So sharing changes no number, only the number of times that it is computed.
Only contexts are shared, so every action token is in a segment of one row alone.

Image tokens of different images have equal ids. So contexts compare the image in place of the id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from etude.batch import Batch, Pack, PackImages, ranges
from etude.errors import BatchError

ID_BYTES = np.dtype(np.int32).itemsize


def pack_prefix_tree(batch: Batch) -> Pack:
    """Pack all rows as segments. Rows of one group share common prefixes of their contexts, at any depth.

    The segments are breadth first. So the prompts of a batch are consecutive tokens, and so are all their completions:
    attention from the ones to the others moves no token.
    """
    rows = _ContextRows.from_batch(batch)
    forest = _PrefixForest(rows)
    for members in rows.by_group:
        forest.add_group(members)
    forest.sort_breadth_first()
    starts, lengths, depths = (torch.tensor(column, dtype=torch.int64) for column in forest.columns)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    path = torch.tensor([segment for segments in forest.paths for segment in segments], dtype=torch.int64)
    positions = ranges(offsets[path], lengths[path])  # [T]: the position of each batch token in the pack
    source = torch.cat([positions.new_full((1,), -1), positions[:-1]])[: len(positions)]
    first = batch.offsets.cpu()
    source[first[:-1][first[1:] > first[:-1]]] = -1
    ends = torch.where(first[1:] > first[:-1], torch.cat([positions, positions.new_full((1,), -1)])[first[1:] - 1], -1)
    taken = ranges(starts, lengths).to(batch.device)  # [P]: a batch token that is each packed token
    images = None
    if batch.image is not None and batch.feature is not None:
        images = PackImages(batch.image[taken], batch.feature[taken], batch.images)
    return Pack(
        ids=batch.ids[taken],
        positions=ranges(depths, lengths).to(batch.device),
        offsets=offsets,
        parent=torch.tensor(forest.parent, dtype=torch.int64),
        source=source.to(batch.device),
        row_ends=ends.to(batch.device),
        images=images,
    )


def micro_batches(batch: Batch, max_tokens: int, by: str = "rollout", *, image_weight: int = 1) -> list[Batch]:
    """Split a batch into batches of whole rollouts or groups with at most `max_tokens` packed tokens.

    A shared context counts once. A unit over the budget is a separate batch. With `by="rollout"`, a group within the
    budget stays together, so that its prompt is computed once. A larger group is split between rollouts, and each part
    has the prompt. image_weight: the tokens that a token with a feature of an image counts as.
    """
    if max_tokens < 1 or by not in ("rollout", "group"):
        raise BatchError(
            f"A batch is split into micro-batches of 1 or more tokens by `rollout` or `group`; not of {max_tokens} by "
            f"`{by}`."
        )
    rows = _ContextRows.from_batch(batch, image_weight)
    pieces = [
        piece
        for members in _indices_by_value(batch.group.tolist())  # also rollouts without a row
        for piece in _split_group(rows, members, max_tokens, by == "rollout")
    ]
    bins = _first_fit(pieces, max_tokens)
    return [batch] if len(bins) == 1 else [batch.select(rollouts) for rollouts in bins]


# -- the rows of a batch, on the host ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ContextRows:
    """The lengths and the contexts of rows. Contexts are bytes, which compare and sort quickly.

    A token that takes a feature of image i has -1 - i there in place of its id.
    """

    starts: list[int]
    lengths: list[int]
    contexts: list[bytes]
    sizes: NDArray[np.int64]
    """[T + 1]: the size of all tokens before each one; an image token may count as several."""
    rollout_row_offsets: list[int]
    """[U + 1]: rollout u has the rows rollout_row_offsets[u] to rollout_row_offsets[u + 1]."""
    by_group: list[list[int]]

    @classmethod
    def from_batch(cls, batch: Batch, image_weight: int = 1) -> _ContextRows:
        """image_weight: the size of a token with a feature of an image."""
        offsets = batch.offsets.cpu().numpy()
        ids = np.ascontiguousarray(batch.ids.cpu().numpy(), dtype=np.int32)
        sizes = np.arange(batch.num_tokens + 1)
        if batch.image is not None:
            image = batch.image.cpu().numpy()
            ids = np.where(image >= 0, -1 - image, ids)
            sizes[1:] += (image_weight - 1) * (image >= 0).cumsum()
        action_tokens = np.flatnonzero(batch.action.cpu().numpy())
        first_actions = np.append(action_tokens, batch.num_tokens)[np.searchsorted(action_tokens, offsets[:-1])]
        ends = np.minimum(first_actions, offsets[1:]).tolist()
        starts = offsets[:-1].tolist()
        return cls(
            starts=starts,
            lengths=np.diff(offsets).tolist(),
            contexts=[ids[start:end].tobytes() for start, end in zip(starts, ends, strict=True)],
            sizes=sizes,
            rollout_row_offsets=batch.rollout_row_offsets.tolist(),
            by_group=_indices_by_value(batch.group[batch.unit].tolist()),
        )


def _indices_by_value(values: Sequence[int]) -> list[list[int]]:
    """Return the indices of each value."""
    indices: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        indices.setdefault(value, []).append(index)
    return list(indices.values())


def _common_prefix_length(a: bytes, b: bytes) -> int:
    """Return the number of equal tokens at the start of two contexts."""
    if a == b:
        return len(a) // ID_BYTES
    shorter = min(len(a), len(b)) // ID_BYTES
    differences: NDArray[np.bool_] = np.frombuffer(a, np.int32, shorter) != np.frombuffer(b, np.int32, shorter)
    return int(differences.argmax()) if differences.any() else shorter


# -- the tree ---------------------------------------------------------------------------------------------------------


@dataclass
class _PrefixForest:
    """The segments, parents before children, and for each row the path of its segments."""

    rows: _ContextRows
    parent: list[int] = field(default_factory=list)
    columns: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))
    """For each segment: its first batch token, its length, and its depth, the number of tokens above it."""
    paths: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.paths = [[] for _ in self.rows.lengths]

    def add_group(self, members: Sequence[int]) -> None:
        """Add the rows of a group. Sorted by their contexts, rows that share a prefix are neighbors."""
        contexts = self.rows.contexts
        order = sorted(members, key=contexts.__getitem__)
        shared = [0, *(_common_prefix_length(contexts[a], contexts[b]) for a, b in pairwise(order))]
        stack = [(0, len(order), 0, -1)]  # from, to (of `order`); the tokens and the segment above them
        while stack:
            low, high, depth, parent = stack.pop()
            if high - low == 1:
                self._add_segment(order[low : low + 1], depth, self.rows.lengths[order[low]], parent)
                continue
            common = min(shared[low + 1 : high])
            segment = self._add_segment(order[low:high], depth, common, parent)
            boundaries = [low, *(i for i in range(low + 1, high) if shared[i] == common), high]
            stack.extend((a, b, common, segment) for a, b in reversed(list(pairwise(boundaries))))

    def sort_breadth_first(self) -> None:
        """Put the roots first, those with children before the others, and then the children of each segment in turn."""
        children: dict[int, list[int]] = {}
        for segment, parent in enumerate(self.parent):
            children.setdefault(parent, []).append(segment)
        order = sorted(children.get(-1, []), key=lambda root: root not in children)
        for segment in order:  # the list grows meanwhile
            order.extend(children.get(segment, []))
        rank = {segment: place for place, segment in enumerate(order)}
        rank[-1] = -1
        self.parent = [rank[self.parent[segment]] for segment in order]
        for column in self.columns:
            column[:] = [column[segment] for segment in order]
        self.paths = [[rank[segment] for segment in path] for path in self.paths]

    def _add_segment(self, members: Sequence[int], depth: int, end: int, parent: int) -> int:
        """Add one segment for these rows, from their token `depth` to `end`, unless it is empty. Return its index."""
        if end == depth:
            return parent
        segment = len(self.parent)
        for column, value in zip(self.columns, (self.rows.starts[members[0]] + depth, end - depth, depth), strict=True):
            column.append(value)
        self.parent.append(parent)
        for row in members:
            self.paths[row].append(segment)
        return segment


# -- the micro-batches ------------------------------------------------------------------------------------------------


class _PrefixCounter:
    """Counts the tokens of a prefix tree, row by row."""

    def __init__(self, rows: _ContextRows) -> None:
        self.rows = rows
        self.contexts: list[bytes] = []

    def add(self, row: int) -> int:
        """Return the tokens that one more row adds. In sorted order, the row that shares most with it is next to it."""
        context = self.rows.contexts[row]
        index = bisect_left(self.contexts, context)
        shared = max(
            (_common_prefix_length(context, other) for other in self.contexts[max(index - 1, 0) : index + 1]), default=0
        )
        if self.contexts[index : index + 1] != [context]:
            self.contexts.insert(index, context)
        start = self.rows.starts[row]
        return int(self.rows.sizes[start + self.rows.lengths[row]] - self.rows.sizes[start + shared])


def _split_group(
    rows: _ContextRows, members: Sequence[int], max_tokens: int, may_split: bool
) -> list[tuple[int, list[int]]]:
    """Return a group as pieces (packed tokens, rollouts): one, or several within the budget if it may be split."""
    pieces: list[tuple[int, list[int]]] = []
    size = 0
    piece = list[int]()
    prefixes = _PrefixCounter(rows)
    for rollout in members:
        row_range = range(rows.rollout_row_offsets[rollout], rows.rollout_row_offsets[rollout + 1])
        added = sum(prefixes.add(row) for row in row_range)
        if may_split and piece and size + added > max_tokens:
            pieces.append((size, piece))
            size = 0
            piece = []
            prefixes = _PrefixCounter(rows)
            added = sum(prefixes.add(row) for row in row_range)
        size += added
        piece.append(rollout)
    return [*pieces, (size, piece)]


def _first_fit(pieces: Sequence[tuple[int, list[int]]], max_tokens: int) -> list[list[int]]:
    """Put the pieces into few bins: the largest first, each into the first bin with room. Rollouts keep their order."""
    bins: list[list[int]] = []
    room: list[int] = []
    for size, rollouts in sorted(pieces, key=lambda piece: -piece[0]):
        bin_index = next((i for i, space in enumerate(room) if space >= size), len(bins))
        if bin_index == len(bins):
            bins.append([])
            room.append(max_tokens)
        room[bin_index] -= size
        bins[bin_index] += rollouts
    return sorted(sorted(rollouts) for rollouts in bins)
