"""The evidence that rules read: the metrics and options of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.observe.step_history import StepHistory

RECENT = 10
"""Steps with the metric that count as recent."""
SURE = 3.0
"""Standard errors that a rise needs to count."""
FEWEST = 5
"""Recent steps that a rule needs, unless it says otherwise."""


@dataclass(frozen=True)
class RunFinding:
    """A problem of a run, with its evidence and its remedy."""

    what: str
    """The evidence, in a sentence."""
    remedy: str
    """The remedy, by options."""
    severity: float
    """From 0 to 1: 1 is a run that learns nothing, or the wrong thing."""
    first: int
    last: int
    """The steps that the evidence is from."""
    numbers: Mapping[str, float]
    """The evidence by metric, as its mean over these steps."""
    rule: str = ""
    cause: str = ""
    """The rule whose finding explains this one; empty if none does."""


@dataclass(frozen=True)
class Series:
    """One metric, at the steps where it is finite."""

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def head(self) -> Series:
        """Return its first values."""
        return Series(self.name, self.steps[:RECENT], self.values[:RECENT])

    def tail(self, count: int = RECENT) -> Series:
        """Return its last values."""
        return Series(self.name, self.steps[-count:], self.values[-count:])

    @property
    def mean(self) -> float:
        """The mean over its steps."""
        return float(self.values.mean())

    def finding(self, what: str, remedy: str, severity: float, **more: float) -> RunFinding:
        """Return a finding with this series as evidence."""
        numbers = {self.name: self.mean} | more
        return RunFinding(what, remedy, min(severity, 1.0), int(self.steps[0]), int(self.steps[-1]), numbers)


@dataclass(frozen=True, slots=True)
class TaskRewards:
    """The rewards of a row of the data, over all times that the run used it as a task."""

    source: str
    row: int
    newest: int
    """The ordinal of the newest task of the row."""
    times: int
    """The tasks of the row that have rewards."""
    answers: int
    """Their answers with a reward."""
    least: float
    most: float


class Evidence:
    """The metrics and options of a run, and the rewards of its tasks."""

    def __init__(self, history: StepHistory, options: Mapping[str, Any], tasks: Sequence[TaskRewards] = ()) -> None:
        """options: the tree of `run.yaml`; empty if it cannot be read. tasks: the rewards of each row; empty if the
        rollouts were not read."""
        self._history = history
        self._options = options
        self.tasks = tasks

    @cached_property
    def reward_ranges(self) -> dict[str, tuple[float, float]]:
        """The lowest and the highest reward of an answer to a task of each data source."""
        ranges: dict[str, tuple[float, float]] = {}
        for task in self.tasks:
            least, most = ranges.get(task.source, (task.least, task.most))
            ranges[task.source] = (min(least, task.least), max(most, task.most))
        return ranges

    @cached_property
    def _steps(self) -> NDArray[np.int64]:
        return np.array(self._history.steps, np.int64)

    def names(self, pattern: str) -> list[str]:
        """Return the names of the metrics that match a pattern."""
        return [name for name in self._history.names if fnmatchcase(name, pattern)]

    def series(self, name: str, *, from_step: int = 1) -> Series:
        """Return a metric. Step 0 is the evaluation before the first step."""
        values = self._history.values(name)
        kept = np.isfinite(values) & (self._steps >= from_step)
        return Series(name, self._steps[kept], values[kept])

    def recent(self, name: str, fewest: int = FEWEST) -> Series | None:
        """Return the last values of a metric; None if too few steps have it."""
        series = self.series(name).tail()
        return series if len(series) >= fewest else None

    def option(self, path: str) -> Any:
        """Return an option; None if the run has none."""
        value: Any = self._options
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def number(self, path: str, default: float) -> float:
        """Return an option that is a number."""
        value = self.option(path)
        return float(value) if isinstance(value, int | float) else default


def rises(series: Series) -> bool:
    """Return whether a series rises by more than its noise."""
    gain, error = rise(series)
    return gain > 0 and gain > SURE * error


def has_learned(evidence: Evidence) -> bool:
    """Return whether the reward has risen since the run began, and is near the best that it was."""
    reward = evidence.series("reward")
    if len(reward) < 2 * RECENT or not rises(reward):
        return False
    best = float(np.convolve(reward.values, np.full(RECENT, 1 / RECENT), "valid").max())
    first = float(reward.values[0])
    return reward.tail().mean >= best - 0.1 * (best - first)


def rise(series: Series) -> tuple[float, float]:
    """Return how much the last third of a series is above its first, and the standard error of that.

    The noise is estimated from differences of neighbors, so that a slow trend does not count as noise.
    """
    third = max(len(series) // 3, 1)
    gain = series.values[-third:].mean() - series.values[:third].mean()
    noise = np.diff(series.values).std() / np.sqrt(2.0) if len(series) > 2 else 0.0
    return float(gain), float(noise * np.sqrt(2.0 / third))
