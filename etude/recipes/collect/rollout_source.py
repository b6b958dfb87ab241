"""The interface between the training loop and the source of its rollouts: the groups that a step trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from etude.observe import Metrics, ProgressReporter
from etude.recipes.collect.rollout_rows import RolloutRows
from etude.records import Rollout

__all__ = ["ProgressFactory", "RolloutSource", "StepGroups"]

ProgressFactory = Callable[[str, float], AbstractContextManager[ProgressReporter]]


@dataclass(frozen=True, eq=False)
class StepGroups:
    """Whole groups with rewards, which a step trains on."""

    rows: Sequence[RolloutRows]
    """The token sequences of each rollout."""
    rollouts: Sequence[Rollout]
    metrics: Metrics
    replayed: bool = False
    """True if they were read from the journal instead of sampled."""


class RolloutSource(Protocol):
    """A source of groups of scored rollouts: an engine and a dataset, or agents."""

    def next(self, step: int) -> StepGroups:
        """Return the groups that this step trains on, within the staleness bound. The wait is bounded."""
        ...
