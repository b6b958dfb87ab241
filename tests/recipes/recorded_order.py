"""The order of tasks of a run, derived from its journal."""

from __future__ import annotations

from collections.abc import Iterator

from etude.data import RowOrder
from etude.store import Event, Journal, RolloutsAdmitted, RolloutState, Status, TaskDropped, TaskIssued


def record_in_order(store: Journal, order: RowOrder, position: int, group_size: int) -> None:
    """Pass to a new order all tasks that were issued up to a position of the journal, and the rewards of each task that
    was admitted or dropped: once."""
    for at, event in store.read(kinds=(TaskIssued, TaskDropped, RolloutsAdmitted)):
        if at > position:
            break
        if isinstance(event, TaskIssued | TaskDropped) and store.task(event.task).use == "val":
            continue
        if isinstance(event, TaskIssued):
            order.replay(event.task, event.row)
        for task in _settled_tasks(store, event):
            states = [state for state in map(store.rollout, store.task(task).rollouts) if state.sample < group_size]
            order.record_rewards(store.task(task).row, list(scores(states)))


def scores(states: list[RolloutState]) -> Iterator[float]:
    """Yield the rewards of rollouts that have one."""
    for state in states:
        if state.status is Status.SUCCEEDED and state.last is not None and state.last.total is not None:
            yield state.last.total


def _settled_tasks(store: Journal, event: Event) -> list[int]:
    """Return the tasks that an event dropped or admitted."""
    if isinstance(event, TaskDropped):
        return [event.task]
    ids = event.rollouts if isinstance(event, RolloutsAdmitted) else ()
    return sorted({store.rollout(id).task for id in ids})
