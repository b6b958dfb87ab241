"""A batch that stays where it was computed.

A controller that passes a batch from one call to the next does not need its tokens. It holds the batch metadata, which
has the length of each rollout, and references to the rest. Ranks that are called with it load it from there.

    remote = crew.call_for_ref(Worker.annotate, batch)   # [0 1 2 3 4 5]  ──►  rank 0: [0 3 4]   rank 1: [1 2 5]
    crew.call(Worker.update, remote.split(2))            # [0 1 2] and [3 4 5], each partitioned again

A remote batch need not exist as a batch at all. Its pieces may be stored values of one rollout each. A rank that loads
some of them then builds a batch from these, with the metadata of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.batch import Batch, BatchMeta
from etude.dispatch.messages import BatchFactory, BatchRef, PayloadRef, StoredBatch


@dataclass(frozen=True, eq=False)
class RemoteBatch:
    """The controller's view of a batch."""

    outline: BatchMeta
    pieces: tuple[PayloadRef, ...]
    """References to the pieces: replies of ranks, or stored values of single rollouts."""
    locations: NDArray[np.int64]
    """[U, 2]: the piece of each rollout, and its index in that piece."""
    make: BatchFactory | None = None
    """Builds a batch from pieces of one rollout each, and from their `metadata`. If None, the pieces are batches."""
    metadata: tuple[Any, ...] = ()

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts."""
        return self.outline.num_rollouts

    @property
    def num_tokens(self) -> int:
        """The number of tokens, context included."""
        return self.outline.num_tokens

    def select(self, rollouts: Sequence[int]) -> RemoteBatch:
        """Return these rollouts, in this order."""
        metadata = tuple(self.metadata[index] for index in rollouts) if self.make is not None else ()
        locations = self.locations[np.asarray(rollouts, np.int64)]
        return RemoteBatch(self.outline.select(rollouts), self.pieces, locations, self.make, metadata)

    def split(self, parts: int, by: str = "rollout") -> list[RemoteBatch]:
        """Return as many parts, with the same rollouts in each as `Batch.split` gives."""
        return [self.select(rollouts.tolist()) for rollouts in self.outline.partition(parts, by)]

    def to_ref(self) -> BatchRef:
        """Return the reference from which a rank loads the batch: only the pieces of its rollouts."""
        used, part = np.unique(self.locations[:, 0], return_inverse=True)
        pieces = tuple(self.pieces[int(index)] for index in used)
        if not pieces and self.make is None:
            pieces = self.pieces[:1]  # for its columns, which a batch without rollouts has too
        locations = np.stack([part, self.locations[:, 1]], axis=1)
        return BatchRef(pieces, locations, self.outline.group.numpy(), self.make, self.metadata)


def to_batch_ref(value: object) -> BatchRef | None:
    """Return the reference of a remote batch; None for any other value."""
    return value.to_ref() if isinstance(value, RemoteBatch) else None


def gather_remote_batch(
    batch: Batch | RemoteBatch, shares: Sequence[Sequence[int]], stored: Sequence[StoredBatch]
) -> RemoteBatch:
    """Combine the ranks' replies to the shares of a batch, in its order."""
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
    """Return a batch that is yet to be built, from one stored value for each rollout and its metadata."""
    locations = np.stack([np.arange(meta.num_rollouts), np.zeros(meta.num_rollouts, np.int64)], axis=1)
    return RemoteBatch(meta, tuple(pieces), locations, factory, tuple(metadata))


def load_batch(ref: BatchRef, load: Callable[[Sequence[PayloadRef]], list[Any]]) -> Batch:
    """Load the batch on a rank that was called with it. A batch that is one whole piece is not copied."""
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
