"""One task over the run: each time that its row of the data was drawn, and the answers at two of these times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError
from etude.store import RolloutState, TaskState
from etude.tools.rollouts.reader import RolloutRecord
from etude.view.queries.rollout import GroupPage, common_prefix, group_page, group_records
from etude.view.queries.step import group_table, rollout_rows
from etude.view.replies import Table
from etude.view.run_reader import RunReader

__all__ = ["TaskPage", "read_task"]

MOST_DRAWS = 200
"""Draws in the table. Of more, evenly spread ones are shown."""
INDEX_S = 1.0
"""Seconds that one request reads tasks into the index."""


@dataclass(frozen=True)
class TaskPage:
    """A row of the data over the run."""

    task: int
    row: int
    source: str
    count: int
    """The number of times that it was drawn."""
    complete: bool
    """False if not all tasks of the run are read yet: ask again."""
    draws: Table
    """Each draw: its task, its step, its rewards and its tokens."""
    first: GroupPage
    second: GroupPage
    common: list[list[int]]
    """The sampled tokens with which each answer of the first group and each of the second begin alike."""


def read_task(reader: RunReader, task: int, first: int | None = None, second: int | None = None) -> TaskPage:
    """Return a task over the run. first, second: the draws to compare, by default the first and the last."""
    journal = reader.journal
    state = journal.task(task)
    index = reader.task_index
    complete = index.refresh(INDEX_S)
    draws = sorted({*index.of_same_row(task, state.row), task})
    for wanted in (first, second):
        if wanted is not None and wanted not in draws:
            raise ConfigError(
                f"Task {wanted} is not a draw of row {state.row}, as task {task} is. The page lists them."
            )
    chosen = (draws[0] if first is None else first, draws[-1] if second is None else second)
    shown = _spread(draws, MOST_DRAWS)
    tasks = journal.load_states(TaskState, sorted({*shown, *chosen}))
    groups = {ordinal: group_records(reader, tasks[ordinal]) for ordinal in dict.fromkeys(chosen)}
    before, after = ([_first_answer(record) for record in groups[ordinal]] for ordinal in chosen)
    pages = [group_page(reader, tasks[ordinal], groups[ordinal]) for ordinal in chosen]
    return TaskPage(
        task,
        state.row,
        state.source,
        len(draws),
        complete,
        _table(reader, list(tasks.values())),
        pages[0],
        pages[1],
        [[common_prefix([one, other]) for other in after] for one in before],
    )


def _first_answer(record: RolloutRecord) -> NDArray[np.int32]:
    return record.turns[0].completion.ids if record.turns else np.empty(0, np.int32)


def _spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most this many values, evenly spread, with the first and the last one."""
    if len(values) <= most:
        return [*values]
    return [values[place] for place in np.linspace(0, len(values) - 1, most).astype(int)]


def _table(reader: RunReader, tasks: Sequence[TaskState]) -> Table:
    """Return a row for each draw."""
    ids = [id for task in tasks for id in task.rollouts]
    states = reader.journal.load_states(RolloutState, ids)
    rows = rollout_rows(reader, [states[id] for id in ids], {task.id: task for task in tasks}, None)
    columns: dict[str, Any] = {**group_table(rows, tasks).columns}
    kept = {name: column for name, column in columns.items() if name not in ("task", "row", "source", "prompt")}
    return Table({"step": [task.step for task in tasks], "task": columns["task"], **kept})
