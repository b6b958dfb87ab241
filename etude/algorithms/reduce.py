"""Reductions from one number for each token to the loss, with denominators over the whole update batch.

A micro-batch contributes its sum divided by the *update batch's* count. So the micro-batches (or the ranks) add up to
the loss of the whole, for any split. A rollout that was rejected, or has no action token, still counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from etude.algorithms.view import Unit, View

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
