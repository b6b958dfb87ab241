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

from etude.batch import Batch, Outline
from etude.dispatch.messages import Kept, Lent, Make, Sent

__all__ = ["Held", "drafted", "held", "lend", "resolved"]


@dataclass(frozen=True, eq=False)
class Held:
    """What the controller has of a batch."""

    outline: Outline
    parts: tuple[Sent, ...]
    """Where the pieces lie: what ranks have answered, or what rollouts are made of."""
    places: NDArray[np.int64]
    """[U, 2]: the piece that each rollout is in, and which one of it."""
    make: Make | None = None
    """Makes a batch of pieces, each of which is one rollout, and of what is `told` of them; None: they are batches."""
    told: tuple[Any, ...] = ()

    @property
    def rollouts(self) -> int:
        """How many there are."""
        return self.outline.rollouts

    @property
    def tokens(self) -> int:
        """How many there are, context included."""
        return self.outline.tokens

    def select(self, rollouts: Sequence[int]) -> Held:
        """These rollouts, in this order."""
        told = tuple(self.told[each] for each in rollouts) if self.make is not None else ()
        places = self.places[np.asarray(rollouts, np.int64)]
        return Held(self.outline.select(rollouts), self.parts, places, self.make, told)

    def split(self, parts: int, by: str = "rollout") -> list[Held]:
        """So many parts, of the very rollouts that `Batch.split` would put into each."""
        return [self.select(each.tolist()) for each in self.outline.cut(parts, by)]

    def lent(self) -> Lent:
        """What a rank needs to look at it: the pieces that it has rollouts in."""
        used, part = np.unique(self.places[:, 0], return_inverse=True)
        pieces = tuple(self.parts[int(each)] for each in used)
        if not pieces and self.make is None:
            pieces = self.parts[:1]  # it has the columns that a batch of no rollout has too
        places = np.stack([part, self.places[:, 1]], axis=1)
        return Lent(pieces, places, self.outline.group.numpy(), self.make, self.told)


def lend(value: object) -> Lent | None:
    """A batch that is held is lent, and nothing else."""
    return value.lent() if isinstance(value, Held) else None


def held(batch: Batch | Held, shares: Sequence[Sequence[int]], kept: Sequence[Kept]) -> Held:
    """What ranks have answered to the shares of a batch, in its order."""
    places = np.zeros((batch.rollouts, 2), np.int64)
    lengths = np.zeros((2, batch.rollouts), np.int64)
    for rank, (share, piece) in enumerate(zip(shares, kept, strict=True)):
        places[share, 0], places[share, 1] = rank, np.arange(len(share))
        lengths[:, share] = piece.outline.tokens_of.numpy(), piece.outline.prompt_of.numpy()
    group = batch.group if isinstance(batch, Batch) else batch.outline.group
    return Held(Outline.told(lengths[0], lengths[1], group), tuple(piece.sent for piece in kept), places)


def drafted(outline: Outline, pieces: Sequence[Sent], make: Make, told: Sequence[Any]) -> Held:
    """A batch that is yet to be made: what each rollout is made of, and what else is known of it."""
    places = np.stack([np.arange(outline.rollouts), np.zeros(outline.rollouts, np.int64)], axis=1)
    return Held(outline, tuple(pieces), places, make, tuple(told))


def resolved(lent: Lent, take: Callable[[Sequence[Sent]], list[Any]]) -> Batch:
    """The batch, for a rank that was called with it. One that is a whole piece is not copied."""
    if lent.make is not None:
        taken = take(lent.pieces)
        whole = lent.make([taken[each] for each in lent.places[:, 0].tolist()], lent.told)
    else:
        whole = _joined(take(lent.pieces), lent.places)
    return whole.replace(group=whole.group.new_tensor(lent.group)) if whole.rollouts else whole


def _joined(pieces: Sequence[Batch], places: NDArray[np.int64]) -> Batch:
    starts = np.cumsum([0, *(piece.rollouts for piece in pieces)])
    order = starts[places[:, 0]] + places[:, 1]
    whole = pieces[0] if len(pieces) == 1 else Batch.concat([piece for piece in pieces if piece.rollouts] or pieces[:1])
    return whole if np.array_equal(order, np.arange(whole.rollouts)) else whole.select(order.tolist())
