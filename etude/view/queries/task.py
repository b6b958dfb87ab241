"""One task over the run: each time that its row of the data was drawn, and the answers at two of these times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError
from etude.store import RolloutState, TaskState
from etude.tools.rollout_reader import RolloutRecord
from etude.view.queries.rollout import GroupPage, common_prefix, group_page, group_records
from etude.view.queries.step import group_table, rollout_rows
from etude.view.replies import Table
from etude.view.run_reader import RunReader

MOST_DRAWS = 200
"""Draws in the table. Of more, evenly spread ones are shown."""
INDEX_S = 0.1
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
    common: list[int]
    """The sampled tokens with which each answer of the second group begins like the best one of the first."""


def read_task(reader: RunReader, task: int, first: int | None = None, second: int | None = None) -> TaskPage:
    """Return a task over the run.

    first, second: the draws to compare; by default the first and the last one that a step has.
    """
    journal = reader.journal
    asked = journal.task(task)
    row = asked.row
    complete = reader.task_index.refresh(INDEX_S)
    draws = sorted({*reader.task_index.of_same_row(asked), task})
    given = [ordinal for ordinal in (first, second) if ordinal is not None]
    for ordinal in given:
        if ordinal not in draws:
            raise ConfigError(f"Task {ordinal} is not a draw of row {row}, as task {task} is. The page lists them.")
    tasks = journal.load_states(TaskState, sorted({*_spread(draws, MOST_DRAWS), task, *given}))
    settled = [ordinal for ordinal, state in tasks.items() if state.step is not None] or list(tasks)
    chosen = (min(settled) if first is None else first, max(settled) if second is None else second)
    groups = {ordinal: group_records(reader, tasks[ordinal]) for ordinal in dict.fromkeys(chosen)}
    before, after = ([_first_answer(record) for record in groups[ordinal]] for ordinal in chosen)
    pages = [group_page(reader, tasks[ordinal], groups[ordinal]) for ordinal in chosen]
    return TaskPage(
        task,
        row,
        tasks[task].source,
        len(draws),
        complete,
        _table(reader, [tasks[ordinal] for ordinal in sorted(tasks)]),
        pages[0],
        pages[1],
        [common_prefix([before[0], answer]) for answer in after] if before else [],
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
    columns: dict[str, Any] = {**group_table(rows, tasks, {}).columns}
    kept = {name: column for name, column in columns.items() if name not in ("task", "row", "source", "prompt")}
    return Table({"step": [task.step for task in tasks], "task": columns["task"], **kept})
