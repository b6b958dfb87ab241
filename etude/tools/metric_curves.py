"""The metrics of a run, read from `metrics.jsonl`.

A run that was killed and resumed may have written steps twice. If the step number goes back, the later lines replace
the earlier ones from that step on. A late line adds to the metrics of its step, and replaces nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from math import nan
from os import SEEK_END
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError
from etude.observe.jsonl import METRICS_FILE, damaged_line_error, parse_step_line

__all__ = ["DEFAULT_METRICS", "Curve", "MetricsFile", "RunCurves", "read_curves", "read_latest"]

DEFAULT_METRICS = (
    *("reward", "expected_reward", "eval/mean@*", "eval/maj@*", "loss", "eval/loss"),
    *("accuracy", "eval/accuracy", "margin", "eval/margin", "entropy", "policy_kl", "kl", "mismatch/k3"),
    "mismatch/rollout_effective_sample_size",
    *("zero_variance_share", "staleness/mean", "answer_length", "truncated", "grad_norm"),
    *("sampled_tokens_per_second", "trained_tokens_per_second", "time/step"),
)
"""The metrics that are drawn by default, if the runs have them: names, with `*` for any characters."""
TAIL_BYTES = 2**16
"""Bytes at the end of a file in which the latest metrics are searched."""

_UNMEASURED = frozenset({"step", "nonfinite", "late"})
"""The fields of a line that are no column."""


@dataclass(frozen=True)
class Curve:
    """One metric of one run, at the steps where it is finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class RunCurves:
    """All curves of one run by metric name, in the order of their first step."""

    directory: Path
    curves: dict[str, Curve]


class MetricsFile:
    """The metrics of a run, read as far as its file is written. `refresh` reads the lines that are new."""

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        """strict: raise a `DataError` that names a damaged line, instead of counting it."""
        self._path, self._strict = path, strict
        self._forget()

    def _forget(self) -> None:
        self.steps: list[int] = []
        self._columns: dict[str, array[float]] = {}
        """The values of each metric up to the last step that has one."""
        self.damaged = 0
        """The number of lines that are not a step with its metrics."""
        self._offset = self._lines = 0

    def refresh(self) -> bool:
        """Read the new lines; return whether there are any."""
        size = self._path.stat().st_size if self._path.is_file() else 0
        if size < self._offset:  # another file has its place
            self._forget()
        if size == self._offset:
            return False
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read(size - self._offset)
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.split(b"\n")[:-1]:
            self._lines += 1
            self._add(parse_step_line(line.decode(errors="replace")))
        return bool(whole)

    def _add(self, line: dict[str, Any] | None) -> None:
        if line is None:
            if self._strict:
                raise damaged_line_error(self._path, self._lines)
            self.damaged += 1
            return
        count = len(self.steps)
        if line.get("late"):
            self._add_late(line)
            return
        if count and self.steps[-1] >= line["step"]:  # a resumed run writes steps again
            count = bisect_left(self.steps, line["step"])
            del self.steps[count:]
            for column in self._columns.values():
                del column[count:]
        self.steps.append(line["step"])
        for name, value in line.items():
            if name not in _UNMEASURED:
                column = self._columns.setdefault(name, array("d"))
                if len(column) < count:
                    column.extend([nan] * (count - len(column)))
                column.append(nan if value is None else value)

    def _add_late(self, line: dict[str, Any]) -> None:
        """Add metrics to a step that is there, or put the step where it belongs."""
        place = bisect_left(self.steps, line["step"])
        if place == len(self.steps) or self.steps[place] != line["step"]:
            self.steps.insert(place, line["step"])
            for column in self._columns.values():
                if len(column) > place:
                    column.insert(place, nan)
        for name, value in line.items():
            if name not in _UNMEASURED and name != "time":
                column = self._columns.setdefault(name, array("d"))
                column.extend([nan] * (place + 1 - len(column)))
                column[place] = nan if value is None else value

    @property
    def names(self) -> list[str]:
        """The names of the metrics and of `time`, in the order of their first step."""
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


def read_curves(directory: Path) -> RunCurves:
    """Read the metrics of a run directory."""
    path = directory / METRICS_FILE
    if not path.is_file():
        raise ConfigError(_missing(directory))
    file = MetricsFile(path, strict=True)
    file.refresh()
    curves = {name: file.curve(name) for name in file.names if name != "time"}
    curves = {name: curve for name, curve in curves.items() if len(curve)}
    if not curves:
        raise ConfigError(f"{path} has no metrics yet. Wait until the run has finished its first step.")
    return RunCurves(directory, curves)


def read_latest(directory: Path) -> dict[str, Any]:
    """Return the latest value of each metric in the last lines of a run, with `step` and `time` of its last line.

    Only the end of the file is read. The result is empty if there is no step yet.
    """
    try:
        with (directory / METRICS_FILE).open("rb") as file:
            end = file.seek(0, SEEK_END)
            file.seek(max(0, end - TAIL_BYTES))
            tail = file.read()
    except OSError:
        return {}
    texts = tail.split(b"\n")[:-1]  # the last one is empty, or being written
    latest: dict[str, Any] = {}
    for text in texts:
        line = parse_step_line(text.decode(errors="replace")) or {}
        latest |= {name: value for name, value in line.items() if not line.get("late") or name not in ("step", "time")}
    latest.pop("nonfinite", None)
    latest.pop("late", None)
    return latest


def _missing(directory: Path) -> str:
    """Return the error sentence for a directory without metrics, with the runs to name instead."""
    if not directory.exists():
        return f"There is no run {directory} (seen from {Path.cwd()}). Name the directory that a run printed."
    if not directory.is_dir():
        return f"{directory} is a file. Name the directory of a run, which has a {METRICS_FILE}."
    runs = sorted(path.parent.name for path in directory.glob(f"*/{METRICS_FILE}"))
    if runs:
        listed = ", ".join(runs[:8]) + (", …" if len(runs) > 8 else "")
        return f"{directory} is not a run; it has {len(runs)} runs: {listed}. Name one of them, or {directory}/*."
    return f"{directory} has no {METRICS_FILE}: no run has started there. Name the directory of a run."
