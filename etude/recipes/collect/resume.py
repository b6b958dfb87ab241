"""Reads what the journal of a run has beyond a checkpoint: the steps to replay, and the rollouts to go on with."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.recipes.collect.agent_player import FIRST_EVALUATION_ORDINAL
from etude.recipes.collect.rollouts import PlayedRollout, RolloutSource
from etude.store import Journal, JournalMark, Phase, RolloutState, TaskState, events

__all__ = ["JournalRemainder", "OpenRollouts", "read_open_rollouts", "read_remainder"]


@dataclass
class JournalRemainder:
    """The events after a checkpoint."""

    admitted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The rollouts of each later step that was admitted."""
    dropped: dict[int, list[TaskState]] = field(default_factory=dict)
    """The tasks that each later step dropped."""
    open_tasks: list[TaskState] = field(default_factory=list)
    """Tasks that were neither admitted nor dropped."""

    @property
    def dropped_by_open_step(self) -> list[TaskState]:
        """The tasks that the step dropped that was open when the run stopped."""
        return [task for step, tasks in self.dropped.items() if step not in self.admitted for task in tasks]


@dataclass
class OpenRollouts:
    """The rollouts of open tasks."""

    ended: dict[int, dict[int, PlayedRollout]] = field(default_factory=dict)
    """The ends of those with a score: by task, and by their number within its group."""
    unfinished: list[tuple[int, int]] = field(default_factory=list)
    """The others that must be made: the task and the number of each."""


def read_remainder(store: Journal, step: int, mark: JournalMark) -> JournalRemainder:
    """Return what the journal has beyond the checkpoint of this step and mark.

    A checkpoint that was saved during a replay has later steps before its mark, so steps are found by their number.
    """
    remainder, admitted_at, dropped = JournalRemainder(), 0, list[tuple[int, int]]()
    for position, event in store.read(kinds=(events.RolloutsAdmitted, events.TaskDropped)):
        match event:
            case events.RolloutsAdmitted(step=trained, rollouts=rollouts) if trained > step:
                remainder.admitted[trained] = rollouts
            case events.RolloutsAdmitted(step=trained) if trained == step:
                admitted_at = position
            case events.TaskDropped(task=task, step=left_by) if left_by > step and task < FIRST_EVALUATION_ORDINAL:
                dropped.append((left_by, task))
    store.verify_mark(mark, admitted_at)
    for left_by, task in dropped:
        remainder.dropped.setdefault(left_by, []).append(store.task(task))
    remainder.open_tasks = [task for task in store.tasks(Phase.OPEN) if task.id < FIRST_EVALUATION_ORDINAL]
    return remainder


def next_ordinal(store: Journal, position: int) -> int:
    """Return the first ordinal from a position on that no task was issued with."""
    for issued in store.iter_states(TaskState, position - 1):
        if issued.id >= FIRST_EVALUATION_ORDINAL:
            break
        position = issued.id + 1
    return position


def read_open_rollouts(store: Journal, source: RolloutSource) -> OpenRollouts:
    """Return the rollouts of open tasks, after what the stop cut off has ended in the journal."""
    result, left = OpenRollouts(), list[RolloutState]()
    for state in store.rollouts(Phase.QUEUED, Phase.RUNNING, Phase.FINISHED):
        if state.task >= FIRST_EVALUATION_ORDINAL:
            continue
        ended = result.ended.setdefault(state.task, {})
        played = source.recall(state)
        if played is None:
            result.unfinished.append((state.task, state.sample))
            left.append(state)
        elif played.succeeded:
            ended[state.sample] = played
    source.resume(left)
    return result
