"""Reductions from one number for each token to the loss, with denominators over the whole update batch.

A micro-batch contributes its sum divided by the *update batch's* count. So the micro-batches (or the ranks) add up to
the loss of the whole, for any split. A rollout that was rejected, or has no action token, still counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from etude.algorithms.segments import Segments
from etude.algorithms.view import Unit, View
from etude.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
"""`token-…`: over all action tokens equally. `seq-mean-…`: first within each unit, then the mean over units."""


@dataclass(frozen=True)
class Denominators:
    """The denominators of an update batch: counts over all its micro-batches on all ranks."""

    tokens: int
    """Action tokens."""
    rollouts: int
    turns: int
    """0 where the batch has no column `turn`."""
    observations: int
    """Tool-output tokens."""
    groups: int

    @classmethod
    def from_view(cls, view: View) -> Denominators:
        """Return the counts of an update batch that one process holds whole."""
        batch = view.batch
        seen = 0 if batch.observation is None else int((batch.observation & ~batch.action).sum())
        turns = 0 if batch.turn is None else view.turns.count
        return cls(len(view.action_index), batch.num_rollouts, turns, seen, batch.num_groups)

    def count_units(self, unit: Unit) -> int:
        """Return the number of units."""
        return self.rollouts if unit == "rollout" else self.turns


def reduce_loss(
    values: Tensor,
    units: Segments,
    how: Reduction,
    *,
    tokens: int,
    count: int,
    constant: float | None = None,
) -> Tensor:
    """[A] → []: reduce one number for each token to this micro-batch's share of the update batch's loss.

    tokens, count: action tokens and units of the update batch. constant: the further divisor of
    `seq-mean-token-sum-norm`, a configured length and never the width of a tensor.
    """
    if how == "token-sum":
        return values.sum()
    if how == "token-mean":
        return values.sum() / max(tokens, 1)
    if how == "seq-mean-token-mean":
        return units.mean(values).sum() / max(count, 1)
    if how == "seq-mean-token-sum":
        return values.sum() / max(count, 1)
    if constant is None:
        raise ConfigError(
            "The reduction `seq-mean-token-sum-norm` divides by a configured length: set `norm_length`, "
            "usually to the longest completion allowed."
        )
    return values.sum() / (max(count, 1) * constant)
