"""The interface between the training loop and whatever makes its rollouts: the groups that a step trains on."""

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
    """What a step trains on: whole groups, scored."""

    rows: Sequence[RolloutRows]
    """Of each rollout, what it is trained on as."""
    rollouts: Sequence[Rollout]
    metrics: Metrics
    replayed: bool = False
    """Whether they were read from the journal instead of sampled."""


class RolloutSource(Protocol):
    """Where groups of scored rollouts come from: an engine and a dataset, or agents."""

    def next(self, step: int) -> StepGroups:
        """The groups that this step trains on, within the staleness bound. The wait is bounded."""
        ...
