"""The steps of a run as its journal has them: what each was trained on, without an engine, agents or a judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from etude.errors import RunError
from etude.recipes.collect.rollout_ends import FailedReward, read_end
from etude.recipes.collect.rollouts import PlayedRollout, StepGroups
from etude.recipes.collect.step_groups import StepGroupsBuilder
from etude.store import Journal, RolloutsAdmitted, StoredImage, TaskState


class RecordedSteps:
    """The admitted steps of a journal."""

    def __init__(self, store: Journal, builder: StepGroupsBuilder, failed_reward: FailedReward = "drop") -> None:
        """builder: builds the records as the run did. failed_reward: of the run's rollouts that failed."""
        self._store = store
        self._builder = builder
        self._failed_reward = failed_reward
        admissions = (event for _, event in store.read(kinds=(RolloutsAdmitted,)))
        self._admitted = {event.step: event.rollouts for event in admissions if isinstance(event, RolloutsAdmitted)}

    @property
    def steps(self) -> Sequence[int]:
        """The numbers of the admitted steps, in order."""
        return sorted(self._admitted)

    def groups(self, step: int) -> StepGroups:
        """Return the groups that a step was trained on."""
        states = [self._store.rollout(id) for id in self._admitted[step]]
        issued = self._store.load_states(TaskState, list(dict.fromkeys(state.task for state in states)))
        tasks = {state.id: state.task for state in issued.values()}
        return self._builder.recorded(step, states, tasks, self._recall_by_id, tuple)

    def images(self, digests: Sequence[str]) -> Mapping[str, StoredImage]:
        """Return the images with these digests that the journal has."""
        return self._store.images(digests)

    def with_batch_columns(self, columns: Mapping[str, str]) -> RecordedSteps:
        """Return the same steps, whose batches carry these columns of the data."""
        return RecordedSteps(self._store, replace(self._builder, batch_columns=columns), self._failed_reward)

    def _recall_by_id(self, id: int) -> PlayedRollout:
        played = read_end(self._store, self._store.rollout(id), self._failed_reward)
        if played is None:
            raise RunError(
                f"The journal has no end of rollout {id}, which a step was trained on. It was damaged, or belongs to "
                "another run. Bring journal.sqlite back from a copy."
            )
        return played
