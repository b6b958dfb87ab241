"""Builds the records of rollouts that a step trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from etude.data.batch_columns import read_numbers
from etude.data.samples import build_samples
from etude.errors import CollectionError
from etude.observe import Mean, Metrics
from etude.recipes.collect.config import CollectionConfig
from etude.recipes.collect.rollouts import PlayedRollout, PutSamples, ScoredRollout, StepGroups
from etude.recipes.collect.statistics import CollectionWarnings
from etude.records import Outcome, Rollout, Task
from etude.store import RolloutState


@dataclass(frozen=True)
class StepGroupsBuilder:
    """Builds the records of a run's rollouts and of its steps."""

    collection: CollectionConfig
    warnings: CollectionWarnings
    episodic: bool
    """True if rollouts may have several turns."""
    greedy: bool
    """True if each group is compared with a greedy answer."""
    tags: tuple[str, ...]
    """Train only on turns with one of these tags; on all, if empty."""
    max_staleness: int
    batch_columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of the batch, by the columns of the data that they are read from."""
    tempered: bool = False
    """True if the sampling temperature is not 1."""

    def rollout_id(self, task: int, sample: int) -> int:
        """Return the id of a rollout, which is unique in the run."""
        return task * (self.collection.group_size + self.greedy) + sample

    def score(self, id: int, task: Task, played: PlayedRollout, put: PutSamples = tuple) -> ScoredRollout:
        """Store the samples of a rollout that a step may train on, and return it."""
        verdict = played.verdict
        rollout = Rollout(
            id,
            task=task.ordinal,
            group=task.ordinal,
            reward=verdict.reward,
            parts=verdict.parts,
            outcome=Outcome.SUCCEEDED,
            truncated=played.truncated,
            role=played.role,
            source=task.source,
            columns=read_numbers(task, self.batch_columns),
        )
        return ScoredRollout.from_samples(
            build_samples(played.turns, id, self.tags),
            rollout,
            put,
            turns=len(played.turns),
            total=played.total,
            metric=self.collection.group_metric(task.ordinal, verdict.parts, played.total, verdict.error),
            oldest=played.oldest,
        )

    def groups(
        self,
        step: int,
        scored: Sequence[ScoredRollout],
        baselines: Mapping[int, float],
        metrics: Metrics,
        *,
        replayed: bool = False,
    ) -> StepGroups:
        """Return the groups of a step. baselines: the reward of the greedy answer to each task."""
        if not replayed:  # the run may have had another bound when the step was admitted
            self._check_staleness(step, scored)
        rollouts = self.warnings.fill_missing_parts([each.rollout for each in scored])
        if self.episodic:
            metrics.add("turns", Mean.over(sum(each.turns for each in scored), len(scored)))
        if self.greedy:
            earned = {rollout.task: baselines[rollout.task] for rollout in rollouts}
            rollouts = [replace(rollout, greedy_reward=earned[rollout.task]) for rollout in rollouts]
            metrics.add("greedy_reward", Mean.over(sum(earned.values()), len(earned)))
        records = [replace(each, rollout=rollout) for each, rollout in zip(scored, rollouts, strict=True)]
        return StepGroups(records, metrics, replayed)

    def recorded(
        self,
        step: int,
        states: Sequence[RolloutState],
        tasks: Mapping[int, Task],
        recall: Callable[[int], PlayedRollout],
        put: PutSamples,
    ) -> StepGroups:
        """Return the groups of a step that was admitted before, with the same rollouts.

        states: the rollouts in the order of the admission. tasks: their tasks, by ordinal. recall: returns how a
        rollout ended.
        """
        greedy = self.collection.group_size
        baselines = {task: recall(self.rollout_id(task, greedy)).total for task in tasks} if self.greedy else {}
        scored = [self.score(state.id, tasks[state.task], recall(state.id), put) for state in states]
        return self.groups(step, scored, baselines, Metrics(), replayed=True)

    def _check_staleness(self, step: int, scored: Sequence[ScoredRollout]) -> None:
        """Refuse rollouts that are older than the bound. Only an engine that draws with other weights than it was sent
        makes such."""
        for each in scored:
            if each.oldest is not None and step - 1 - each.oldest > self.max_staleness:
                raise CollectionError(
                    f"Rollout {each.rollout.id} of step {step} has tokens of version {each.oldest}, and "
                    f"`max_staleness={self.max_staleness}` allows none older than {step - 1 - self.max_staleness}. An "
                    "engine drew with older weights than those that were published to it. Look at the servers' logs."
                )
