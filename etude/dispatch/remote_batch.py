"""A batch that stays where it was computed.

A controller that hands a batch from one call to the next need not have its tokens: it holds an outline, which says how
long each rollout is, and where the rest lies. Ranks that are called with it look at what lies there.

    held = crew.hold(Worker.annotate, batch)      # [0 1 2 3 4 5]  ──►  rank 0: [0 3 4]   rank 1: [1 2 5]
    crew.call(Worker.update, held.split(2))       # [0 1 2] and [3 4 5], each shared out anew

A batch need not have been computed at all: where each piece is what one rollout is made of, whoever looks at some of
them makes a batch of those, by what the controller knows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.batch import Batch, BatchMeta
from etude.dispatch.messages import BatchFactory, BatchRef, PayloadRef, StoredBatch

__all__ = ["RemoteBatch", "compose_remote_batch", "gather_remote_batch", "load_batch", "to_batch_ref"]


@dataclass(frozen=True, eq=False)
class RemoteBatch:
    """What the controller has of a batch."""

    outline: BatchMeta
    pieces: tuple[PayloadRef, ...]
    """Where the pieces lie: what ranks have answered, or what rollouts are made of."""
    locations: NDArray[np.int64]
    """[U, 2]: the piece that each rollout is in, and which one of it."""
    make: BatchFactory | None = None
    """Make a batch from pieces of one rollout each, and from their `metadata`; with None, the pieces are batches."""
    metadata: tuple[Any, ...] = ()

    @property
    def num_rollouts(self) -> int:
        """How many there are."""
        return self.outline.num_rollouts

    @property
    def num_tokens(self) -> int:
        """How many there are, context included."""
        return self.outline.num_tokens

    def select(self, rollouts: Sequence[int]) -> RemoteBatch:
        """These rollouts, in this order."""
        metadata = tuple(self.metadata[index] for index in rollouts) if self.make is not None else ()
        locations = self.locations[np.asarray(rollouts, np.int64)]
        return RemoteBatch(self.outline.select(rollouts), self.pieces, locations, self.make, metadata)

    def split(self, parts: int, by: str = "rollout") -> list[RemoteBatch]:
        """So many parts, of the very rollouts that `Batch.split` would put into each."""
        return [self.select(rollouts.tolist()) for rollouts in self.outline.partition(parts, by)]

    def to_ref(self) -> BatchRef:
        """What a rank needs to look at it: the pieces that it has rollouts in."""
        used, part = np.unique(self.locations[:, 0], return_inverse=True)
        pieces = tuple(self.pieces[int(index)] for index in used)
        if not pieces and self.make is None:
            pieces = self.pieces[:1]  # it has the columns that a batch of no rollout has too
        locations = np.stack([part, self.locations[:, 1]], axis=1)
        return BatchRef(pieces, locations, self.outline.group.numpy(), self.make, self.metadata)


def to_batch_ref(value: object) -> BatchRef | None:
    """A batch that is held is lent, and nothing else."""
    return value.to_ref() if isinstance(value, RemoteBatch) else None


def gather_remote_batch(
    batch: Batch | RemoteBatch, shares: Sequence[Sequence[int]], stored: Sequence[StoredBatch]
) -> RemoteBatch:
    """What ranks have answered to the shares of a batch, in its order."""
    locations = np.zeros((batch.num_rollouts, 2), np.int64)
    lengths = np.zeros((2, batch.num_rollouts), np.int64)
    for rank, (share, part) in enumerate(zip(shares, stored, strict=True)):
        locations[share, 0], locations[share, 1] = rank, np.arange(len(share))
        lengths[:, share] = part.outline.rollout_lengths.numpy(), part.outline.prompt_lengths.numpy()
    group = batch.group if isinstance(batch, Batch) else batch.outline.group
    return RemoteBatch(
        BatchMeta.from_lengths(lengths[0], lengths[1], group), tuple(part.sent for part in stored), locations
    )


def compose_remote_batch(
    meta: BatchMeta, pieces: Sequence[PayloadRef], factory: BatchFactory, metadata: Sequence[Any]
) -> RemoteBatch:
    """A batch that is yet to be made: what each rollout is made of, and what else is known of it."""
    locations = np.stack([np.arange(meta.num_rollouts), np.zeros(meta.num_rollouts, np.int64)], axis=1)
    return RemoteBatch(meta, tuple(pieces), locations, factory, tuple(metadata))


def load_batch(ref: BatchRef, load: Callable[[Sequence[PayloadRef]], list[Any]]) -> Batch:
    """The batch, for a rank that was called with it. One that is a whole piece is not copied."""
    if ref.make is not None:
        values = load(ref.pieces)
        batch = ref.make([values[index] for index in ref.locations[:, 0].tolist()], ref.metadata)
    else:
        batch = _concat_pieces(load(ref.pieces), ref.locations)
    return batch.replace(group=batch.group.new_tensor(ref.group)) if batch.num_rollouts else batch


def _concat_pieces(pieces: Sequence[Batch], locations: NDArray[np.int64]) -> Batch:
    starts = np.cumsum([0, *(piece.num_rollouts for piece in pieces)])
    order = starts[locations[:, 0]] + locations[:, 1]
    batch = (
        pieces[0] if len(pieces) == 1 else Batch.concat([piece for piece in pieces if piece.num_rollouts] or pieces[:1])
    )
    return batch if np.array_equal(order, np.arange(batch.num_rollouts)) else batch.select(order.tolist())
