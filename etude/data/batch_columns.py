"""Numbers of the data that a batch carries for a loss or an advantage of the user's own: `data.batch_columns`.

The option maps the name of a column of the batch to a column of the data. Each rollout gets the number of its task.
Numbers are read from a task's fields, which the journal has: a replayed step has the numbers of the recorded one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from etude.data.dataset import Dataset
from etude.data.files import column_paths, lookup
from etude.errors import DataError
from etude.records import Task


def check_numbers(dataset: Dataset, columns: Mapping[str, str]) -> None:
    """Refuse a row that lacks one of the columns, or has no finite number there, before a run begins."""
    for name, path in columns.items():
        for row, value in enumerate(dataset.column(path)):
            if _to_number(value) is None:
                raise _no_number(dataset.location(row), name, path, value, dataset.row(row))


def read_numbers(task: Task, columns: Mapping[str, str]) -> dict[str, float]:
    """Return the numbers of a task, by the names of the columns of the batch."""
    numbers: dict[str, float] = {}
    for name, path in columns.items():
        value = lookup(task.fields, path)
        number = _to_number(value)
        if number is None:
            raise _no_number(f"Task {task.ordinal}", name, path, value, task.fields)
        numbers[name] = number
    return numbers


def _to_number(value: Any) -> float | None:
    """Return a finite number, also one written as text, as all numbers in CSV are; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _no_number(where: str, name: str, path: str, value: Any, row: Mapping[str, Any]) -> DataError:
    option = f"`data.batch_columns.{name}={path}`"
    paths = list(column_paths(row))
    if path not in paths:
        return DataError(
            f"{where} has no column `{path}`, which {option} carries into the batch; it has {', '.join(paths)}. Give "
            "every task that number, or name another column."
        )
    return DataError(
        f"{where} has {value!r:.60} in the column `{path}`, and {option} needs a finite number. Write a number there, "
        "or leave the row out."
    )
