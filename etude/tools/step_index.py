"""The steps of a run's journal, found by the admissions in it; the journal may grow meanwhile.

A refresh reads only the admissions that are new. The tasks that a step dropped were written between the admission of
the step before and that of the step after it. They are read only for the step that is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.store import AdvantagesEstimated, Journal, RolloutsAdmitted, TaskDropped, TaskState


@dataclass(frozen=True, slots=True, eq=False)
class AdmittedStep:
    """A step that trained on rollouts."""

    step: int
    rollouts: NDArray[np.int64]
    version: int
    """The trainer's policy version at the step; -1 is unknown."""
    begins: int
    """The position in the journal of the admission of the step before; 0 for the first one."""
    position: int
    """The position of its admission."""


class StepIndex:
    """The admitted steps of a journal."""

    def __init__(self, store: Journal) -> None:
        self._store = store
        self._admitted: dict[int, AdmittedStep] = {}
        self._position = 0
        """All admissions up to here are read."""
        self._last_admission = 0
        self._open_dropped: dict[int, list[int]] = {}
        """The tasks that steps without an admission dropped."""
        self._dropped_until = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the admissions that were written since the last call."""
        newest = self._store.position
        if newest == self._position:
            return
        for position, event in self._store.read(self._position, kinds=(RolloutsAdmitted,), until=newest):
            assert isinstance(event, RolloutsAdmitted)
            rollouts = np.array(event.rollouts, np.int64)
            self._admitted[event.step] = AdmittedStep(
                event.step, rollouts, event.version, self._last_admission, position
            )
            self._last_admission = position
        self._position = newest

    @property
    def admitted(self) -> Sequence[AdmittedStep]:
        """The admitted steps, in their order."""
        return list(self._admitted.values())

    @property
    def steps(self) -> list[int]:
        """The steps that trained on rollouts or dropped tasks. A step whose tasks all failed is never admitted."""
        return sorted(self._admitted.keys() | self._dropped_without_admission().keys())

    def get(self, step: int) -> AdmittedStep | None:
        """Return an admitted step, or None."""
        return self._admitted.get(step)

    def dropped(self, step: int) -> list[int]:
        """Return the tasks that a step dropped, without those of an evaluation."""
        admitted = self._admitted.get(step)
        if admitted is None:
            return self._dropped_without_admission().get(step, [])
        following = self._admitted.get(step + 1)
        until = self._position if following is None else following.position
        return self._read_dropped(admitted.begins, until).get(step, [])

    def advantages(self, step: int) -> dict[int, float]:
        """Return the advantage of each rollout that a step trained on. It is empty until the step has trained."""
        admitted = self._admitted.get(step)
        if admitted is None:
            return {}
        following = self._admitted.get(step + 1)
        until = self._position if following is None else following.position
        for _, event in self._store.read(admitted.position, kinds=(AdvantagesEstimated,), until=until):
            if isinstance(event, AdvantagesEstimated) and event.step == step:
                return dict(zip(event.rollouts, event.advantages, strict=True))
        return {}

    def _dropped_without_admission(self) -> dict[int, list[int]]:
        """Return the tasks that were dropped after the last admission, by step."""
        if self._dropped_until < self._last_admission:
            self._open_dropped = {}
            self._dropped_until = self._last_admission
        for step, tasks in self._read_dropped(self._dropped_until, self._position).items():
            if step not in self._admitted:
                self._open_dropped.setdefault(step, []).extend(tasks)
        self._dropped_until = self._position
        return self._open_dropped

    def _read_dropped(self, after: int, until: int) -> dict[int, list[int]]:
        dropped: dict[int, list[int]] = {}
        events = [event for _, event in self._store.read(after, kinds=(TaskDropped,), until=until)]
        drops = [event for event in events if isinstance(event, TaskDropped)]
        tasks = self._store.load_states(TaskState, [event.task for event in drops])
        for event in drops:
            if tasks[event.task].use == "train":
                dropped.setdefault(event.step, []).append(event.task)
        return dropped
