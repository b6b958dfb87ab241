"""The metrics of a run by step: added by a run that trains, or read from its `metrics.jsonl`.

A run that was killed and resumed may write steps twice. If the step number goes back, the later metrics replace the
earlier ones from that step on. Late metrics are added to those of their step, and replace nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.observe.jsonl import METRICS_FILE, NON_METRIC_FIELDS, LinePosition, parse_step_line, read_new_lines

_UNMEASURED = NON_METRIC_FIELDS - {"time"}
"""The fields of a line that are no column."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run, at the steps where it is finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)


class StepHistory:
    """Metrics that are added step by step. A value that is None is not finite."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._columns: dict[str, array[float]] = {}
        """The values of each metric up to the last step that has one."""

    def add(self, step: int, values: Mapping[str, float | None], *, late: bool = False) -> None:
        """Add the metrics of a step. They replace that step and all later ones, unless they are late: then they are
        added to those of the step."""
        place = bisect_left(self.steps, step)
        if not late:
            del self.steps[place:]
            for column in self._columns.values():
                del column[place:]
        if self.steps[place : place + 1] != [step]:
            self.steps.insert(place, step)
            for column in self._columns.values():
                if len(column) > place:
                    column.insert(place, nan)
        for name, value in values.items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([nan] * (place + 1 - len(column)))
            column[place] = nan if value is None else value

    @property
    def names(self) -> list[str]:
        """The names of the metrics, in the order of their first step."""
        return list(self._columns)

    def values(self, name: str) -> NDArray[np.float64]:
        """Return the values of a metric, one for each step. NaN: the step has no finite value."""
        values = np.full(len(self.steps), nan)
        column = self._columns.get(name, array("d"))
        values[: len(column)] = column
        return values

    def curve(self, name: str) -> Curve:
        """Return one metric, at the steps where it is finite."""
        values = self.values(name)
        measured = np.isfinite(values)
        return Curve(np.array(self.steps, np.int64)[measured], values[measured])


class MetricsFile(StepHistory):
    """The metrics in a run's `metrics.jsonl`, as far as they are written. `refresh` reads the lines that are new.

    `time` is a column too: when the line of a step was written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.damaged = 0
        """The number of lines that are not a step with its metrics."""
        self.last_step = 0
        """The last step that was ever written. A resumed run may repeat steps before it."""
        self._position = LinePosition()

    @property
    def problem(self) -> str:
        """A sentence about the damaged lines; empty if there are none."""
        lines = "1 line of {} is" if self.damaged == 1 else f"{self.damaged} lines of {{}} are"
        return f"{lines.format(METRICS_FILE)} damaged, and left out." if self.damaged else ""

    def refresh(self) -> bool:
        """Read the new lines; return whether there are any."""
        lines, self._position, is_other = read_new_lines(self._path, self._position)
        if is_other:
            self.steps = []
            self._columns = {}
            self.damaged = 0
            self.last_step = 0
        for line in lines:
            self._add_line(line)
        return bool(lines)

    def _add_line(self, text: str) -> None:
        fields = parse_step_line(text)
        if fields is None:
            self.damaged += 1
            return
        self.last_step = max(self.last_step, fields["step"])
        late = bool(fields.get("late"))
        unmeasured = NON_METRIC_FIELDS if late else _UNMEASURED
        values = {name: value for name, value in fields.items() if name not in unmeasured}
        self.add(fields["step"], values, late=late)
