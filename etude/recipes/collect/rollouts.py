"""The tasks that a run issues, and the forms that a rollout takes on its way into a training step.

    IssuedTasks ─► RolloutRequest ─► RequestedRollouts ─► PlayedRollout ─► ScoredRollout ─► StepGroups ─► Batch

As soon as a rollout is scored, its token sequences are stored where the ranks can read them (`Crew.put`). On a cluster
that is the object store. The controller keeps only a few numbers of each, and builds a step from those
(`Learners.annotate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from etude.data import Dataset, RowOrder
from etude.observe import Metrics
from etude.records import Outcome, Rollout, Sample, Task, Turn
from etude.rewards import Verdict
from etude.store import TaskState

PutSamples = Callable[[Sequence[Sample]], Any]
"""Stores sequences, and returns a reference to them."""


class IssuedTasks:
    """Takes tasks from the run's order, and records their rewards in it."""

    def __init__(self, dataset: Dataset, order: RowOrder) -> None:
        self._dataset = dataset
        self.order = order
        self._tasks: dict[int, Task] = {}

    def task(self, ordinal: int) -> Task:
        """Return the task of an ordinal: one that was issued before, or the next in the run's order.

        Only a task that was not issued before has the bytes of its images: the caller stores them.
        """
        if ordinal not in self._tasks:
            task = self._dataset.task(self.order.advance_to(ordinal), ordinal)
            self._tasks[ordinal] = replace(task, images={})
            return task
        return self._tasks[ordinal]

    def replay(self, tasks: Iterable[TaskState]) -> None:
        """Move the order past tasks that were issued before the restart, and know them again."""
        for task in sorted(tasks, key=lambda task: task.id):
            if task.id >= self.order.position:
                self.order.replay(task.id, task.row)
            self._tasks[task.id] = task.task

    def settle(self, ordinal: int, rewards: Sequence[float]) -> None:
        """Record the rewards of a task's rollouts in the order, and forget the task."""
        self.order.record_rewards(row_of(self._tasks.pop(ordinal)), rewards)


@dataclass(frozen=True, slots=True, eq=False)
class PlayedRollout:
    """The end of a rollout, or of one attempt at it."""

    turns: tuple[Turn, ...]
    """The turns with their rewards; also those before a failure."""
    verdict: Verdict
    """The reward function's verdict on the last answer, with the named parts of all rewards."""
    truncated: bool = False
    finish: str = ""
    """The reason of the end, as from `player.end_reason`; empty without an answer."""
    role: int = 0
    waited: float = 0.0
    """Seconds spent in the environment and the tools."""
    calls: int = 0
    """Number of tool calls; `failed_calls` counts those that failed."""
    failed_calls: int = 0
    lost: tuple[PlayedRollout, ...] = ()
    """The attempts before this one, which failed."""
    times: tuple[tuple[float, float], ...] = ()
    """Of each turn that an engine drew now, the times at which the engine began and ended, in seconds since 1970."""

    @property
    def turn_rewards(self) -> float:
        """The sum of its turns' rewards."""
        return sum((turn.reward for turn in self.turns if turn.reward is not None), 0.0)

    @property
    def total(self) -> float:
        """The sum of all its rewards."""
        return self.verdict.reward + self.turn_rewards

    @property
    def oldest(self) -> int | None:
        """The oldest version among the tokens that the policy wrote; None without one."""
        return min((turn.oldest for turn in self.turns if turn.oldest is not None), default=None)

    @property
    def succeeded(self) -> bool:
        """True if it has a score."""
        return self.verdict.outcome is Outcome.SUCCEEDED


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRollout:
    """A rollout that a step may train on, with the numbers of its token sequences."""

    rollout: Rollout
    samples_ref: Any
    """The sequences, or a reference to them."""
    models: tuple[str, ...]
    """Of each sequence, the model that wrote its tokens."""
    has_anchor: tuple[bool, ...]
    """Of each sequence, whether it names states."""
    alternatives: tuple[int | None, ...]
    """Of each sequence, the number of alternatives to each token; None if the model wrote none of them."""
    route_formats: tuple[tuple[int, str] | None, ...]
    """Of each sequence, the form of its routes; see `Sample.route_format`."""
    tokens: int
    """Number of tokens of all sequences."""
    first_action: int
    """Number of tokens before the first one that the model wrote."""
    prompt_tokens: int
    """Number of tokens before that one in the first sequence."""
    answer_tokens: int
    """Number of tokens that the model wrote."""
    observation_tokens: int
    """Number of tokens that the environment showed between answers."""
    sample_rewards: tuple[float, ...]
    """The rewards of turns that are trained on, in order."""
    turns: int = 0
    """Number of its turns."""
    total: float = 0.0
    """The sum of all its rewards, those of all turns included."""
    metric: float = 0.0
    """The number that groups are compared by: the total, or the part that `collect.metric` names."""
    oldest: int | None = None
    """The oldest policy version among its answers' tokens."""
    images: tuple[str, ...] = ()
    """The digests of the images that its sequences show, each once."""

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Sample],
        rollout: Rollout,
        put: PutSamples = tuple,
        *,
        turns: int = 0,
        total: float = 0.0,
        metric: float = 0.0,
        oldest: int | None = None,
    ) -> ScoredRollout:
        """Store these sequences, and return their rollout."""
        action_positions = [np.flatnonzero(sample.action) for sample in samples]
        first = [
            int(at[0]) if len(at) else len(sample.ids) for sample, at in zip(samples, action_positions, strict=True)
        ]
        lengths = [len(sample.ids) for sample in samples]
        first_spoken = next((row for row, at in enumerate(action_positions) if len(at)), None)
        return cls(
            rollout=rollout,
            samples_ref=put(samples),
            models=tuple(sample.model for sample in samples),
            has_anchor=tuple(sample.anchor is not None for sample in samples),
            alternatives=tuple(sample.num_alternatives for sample in samples),
            route_formats=tuple(sample.route_format for sample in samples),
            tokens=sum(lengths),
            first_action=sum(lengths) if first_spoken is None else sum(lengths[:first_spoken]) + first[first_spoken],
            prompt_tokens=first[0] if first else 0,
            answer_tokens=sum(map(len, action_positions)),
            observation_tokens=sum(
                int(sample.observation.sum()) for sample in samples if sample.observation is not None
            ),
            sample_rewards=tuple(
                float(each) for s in samples if s.reward is not None for each in s.reward[s.reward != 0]
            ),
            turns=turns,
            total=total,
            metric=metric,
            oldest=oldest,
            images=tuple(dict.fromkeys(span.digest for sample in samples for span in sample.images)),
        )

    @property
    def trained_reward(self) -> float:
        """The sum of its reward and the rewards of the turns that are trained on, added as in `Batch.metric`."""
        reward = self.rollout.reward
        for turn_reward in self.sample_rewards:  # `sum` compensates rounding errors since Python 3.12
            reward += turn_reward
        return reward


@dataclass(frozen=True, slots=True, eq=False)
class StepGroups:
    """Whole groups with rewards, which a step trains on."""

    scored: Sequence[ScoredRollout]
    metrics: Metrics
    replayed: bool = False
    """True if they were read from the journal instead of sampled."""

    @property
    def rollouts(self) -> list[Rollout]:
        """The records of its rollouts."""
        return [scored.rollout for scored in self.scored]


def row_of(task: Task) -> int:
    """Return the row of the dataset that a task was made from."""
    row = task.fields["row"]
    assert isinstance(row, int)
    return row
