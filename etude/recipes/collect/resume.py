"""The part of a run's journal beyond a checkpoint: steps to replay, and rollouts to continue."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.collect.rollouts import PlayedRollout
from etude.store import Journal, JournalMark, Phase, RolloutState, Status, TaskState
from etude.store.journal import events


@dataclass
class JournalRemainder:
    """The events after a checkpoint."""

    admitted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The rollouts of each later step that was admitted."""
    dropped: dict[int, list[TaskState]] = field(default_factory=dict)
    """The tasks that were dropped while each later step was next. The order of tasks does not have their rewards."""
    open_tasks: list[TaskState] = field(default_factory=list)
    """Tasks that were neither admitted nor dropped."""
    dropped_ahead: list[TaskState] = field(default_factory=list)
    """The dropped tasks that no admitted step looked at. They count in the windows of later steps, though an earlier
    step may have been next when they were dropped."""
    end: int = 0
    """The first ordinal that no admitted step looked at."""
    skipped: tuple[int, ...] = ()
    """The ordinals before it that the last admitted step left to later ones."""

    @property
    def dropped_by_open_step(self) -> list[TaskState]:
        """The tasks that the step dropped that was open when the run stopped."""
        return [task for step, tasks in self.dropped.items() if step not in self.admitted for task in tasks]

    def tasks(self, store: Journal) -> list[TaskState]:
        """Return all tasks that were issued after the checkpoint or are open."""
        admitted = store.load_states(TaskState, list(set(self._admitted_tasks(store).values())))
        return [*admitted.values(), *(task for tasks in self.dropped.values() for task in tasks), *self.open_tasks]

    def is_interleaved(self, store: Journal) -> bool:
        """Return whether a step has a task that follows one of a later step, as a bound above 0 can leave it."""
        task_of = self._admitted_tasks(store)
        last = -1
        for step in sorted(self.admitted.keys() | self.dropped.keys()):
            tasks = {task_of[id] for id in self.admitted.get(step, ())} | {t.id for t in self.dropped.get(step, ())}
            if min(tasks) < last:
                return True
            last = max(tasks)
        return any(task.id < last for task in self.open_tasks)

    def _admitted_tasks(self, store: Journal) -> dict[int, int]:
        """Return the task of each rollout that a later step admitted."""
        states = store.load_states(RolloutState, [id for ids in self.admitted.values() for id in ids])
        return {id: state.task for id, state in states.items()}


def read_remainder(store: Journal, step: int, mark: JournalMark) -> JournalRemainder:
    """Return what the journal has beyond the checkpoint of this step and mark.

    A checkpoint that was saved during a replay has later steps before its mark, so steps are found by their number.
    """
    remainder = JournalRemainder()
    dropped = list[tuple[int, events.TaskDropped]]()
    admitted_at = 0
    last, known = events.RolloutsAdmitted(0, (), end=0, version=0), mark.position
    for position, event in store.read(kinds=(events.RolloutsAdmitted, events.TaskDropped)):
        match event:
            case events.RolloutsAdmitted(step=trained, rollouts=rollouts):
                last = max(last, event, key=lambda admission: admission.step)
                if trained > step:
                    remainder.admitted[trained] = rollouts
                    if position <= mark.position:  # saved during a replay: the order had no reward of a later step
                        known = 0
                elif trained == step:
                    admitted_at = position
            case events.TaskDropped():
                dropped.append((position, event))
    store.verify_mark(mark, admitted_at)
    remainder.end = last.end
    remainder.skipped = last.skipped
    tasks = store.load_states(TaskState, [each.task for _, each in dropped])
    for position, each in dropped:
        task = tasks[each.task]
        if task.use != "train":
            continue
        if each.step > step and position > known:
            remainder.dropped.setdefault(each.step, []).append(task)
        if task.id >= last.end or task.id in last.skipped:
            remainder.dropped_ahead.append(task)
    remainder.open_tasks = [task for task in store.tasks(Phase.OPEN) if task.use == "train"]
    return remainder


def next_ordinal(store: Journal, position: int) -> int:
    """Return the first ordinal from a position on that no task for training was issued with."""
    for issued in store.iter_states(TaskState, position - 1, use="train"):
        position = issued.id + 1
    return position


def read_open_rollouts(store: Journal, requested: RequestedRollouts) -> dict[int, dict[int, PlayedRollout | None]]:
    """Return the rollouts of open tasks, by task and number.

    None: it must be made. One that failed is left out.
    """
    result: dict[int, dict[int, PlayedRollout | None]] = {}
    for state in store.rollouts(Phase.QUEUED, Phase.RUNNING, Phase.FINISHED):
        if state.use != "train":
            continue
        rollouts = result.setdefault(state.task, {})
        played = requested.recall(state)
        if played is None or played.succeeded:
            rollouts[state.sample] = played
    return result


def unread_version(store: Journal, id: int) -> int | None:
    """Return the oldest policy version of a rollout that ended before the stop, but was not read; None of any other."""
    state = store.rollout(id)
    if state.last is None or state.status in (Status.QUEUED, Status.RUNNING):
        return None
    return state.last.oldest
