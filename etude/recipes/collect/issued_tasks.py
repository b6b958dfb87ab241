"""The tasks that a run has issued and not settled, with the order that they are taken from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from etude.data import Dataset, RowOrder
from etude.recipes.collect.rollouts import row_of
from etude.records import Task
from etude.store import TaskState


class IssuedTasks:
    """Takes tasks from the run's order, and tells it what they earned."""

    def __init__(self, dataset: Dataset, order: RowOrder) -> None:
        self._dataset = dataset
        self.order = order
        self._tasks: dict[int, Task] = {}

    def task(self, ordinal: int) -> Task:
        """Return the task of an ordinal: one that was issued before, or the next in the run's order."""
        if ordinal not in self._tasks:
            self._tasks[ordinal] = self._dataset.task(self.order.advance_to(ordinal), ordinal)
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
