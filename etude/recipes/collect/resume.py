"""Reads what the journal of a run has beyond a checkpoint: the steps to replay, and the rollouts to go on with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.recipes.collect.agent_player import FIRST_EVALUATION_ORDINAL
from etude.recipes.collect.rollouts import PlayedRollout, RolloutSource
from etude.recipes.collect.scheduler import OpenGroup
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

    def tasks(self, store: Journal) -> list[TaskState]:
        """Return all tasks that were issued after the checkpoint or are open."""
        rollouts = store.load_states(RolloutState, [id for ids in self.admitted.values() for id in ids])
        admitted = store.load_states(TaskState, list({state.task for state in rollouts.values()}))
        return [*admitted.values(), *(task for tasks in self.dropped.values() for task in tasks), *self.open_tasks]


@dataclass
class OpenRollouts:
    """The rollouts of open tasks."""

    ended: dict[int, dict[int, PlayedRollout]] = field(default_factory=dict)
    """The ends of those with a score: by task, and by their number within its group."""
    unfinished: list[tuple[int, int]] = field(default_factory=list)
    """The others that must be made: the task and the number of each."""

    def groups(self, metrics: Mapping[int, Mapping[int, float]], *, versions: bool) -> list[OpenGroup]:
        """Return the groups of open tasks. metrics: those of each task's scored rollouts. versions: whether the age of
        tokens matters."""
        held: dict[int, dict[int, int]] = {task: {} for task in metrics}
        for task, sample in self.unfinished:
            held[task][sample] = 0  # the source counts its failures
        groups: list[OpenGroup] = []
        for task in metrics:
            drawn = [played.oldest for played in self.ended.get(task, {}).values() if played.oldest is not None]
            oldest = min(drawn, default=None) if versions else None
            groups.append(OpenGroup(task, metrics[task], held[task], oldest))
        return groups


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
