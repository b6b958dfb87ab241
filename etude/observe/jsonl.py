"""The sink that is always on: one JSON object per line in `metrics.jsonl`.

    {"step": 3, "time": 1795210221.77, "loss": 0.43, "kl": null, "nonfinite": ["kl"]}

Each line is handed to the operating system when its step ends, so a killed process leaves whole lines and at most one
torn one behind them; opening the file again removes that. JSON has no NaN and no infinity: such a value becomes
null and its name is listed. A resumed run appends, after the last step that has its line.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from etude.errors import DataError
from etude.integrity import add_path_to_errors
from etude.observe.log import get_logger
from etude.observe.sinks import RunInfo

__all__ = ["METRICS_FILE", "JsonlSink", "parse_step_line", "read_last_step", "read_steps"]

METRICS_FILE = "metrics.jsonl"
NON_METRIC_FIELDS = frozenset({"step", "time", "nonfinite"})
"""Other fields of a line."""
MOST_STEPS = 2**53
_BLOCK = 1 << 16


class JsonlSink:
    """Writes `metrics.jsonl` in the run directory."""

    name = "jsonl"

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now

    def open(self, run: RunInfo) -> None:
        """Open for appending, after cutting off a line that was torn."""
        run.directory.mkdir(parents=True, exist_ok=True)
        path = run.directory / METRICS_FILE
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one whole line."""
        line: dict[str, object] = {"step": step, "time": self._now()}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        if nonfinite:
            line["nonfinite"] = nonfinite
        with add_path_to_errors(Path(self._file.name)):
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_last_step(directory: Path) -> int:
    """The last step that has its line in this run directory; -1 where none has. A line that is none is told of and
    counts for nothing: nothing that is trained follows from it."""
    path = directory / METRICS_FILE
    _cut_torn_line(path)
    last = -1
    for number, text in _lines(path):
        line = parse_step_line(text)
        if line is None:
            message = "%s, line %d, is not a step with its metrics, was damaged or changed by hand, and is passed over."
            get_logger("observe").warning(message, path, number)
        else:
            last = max(last, line["step"])
    return last


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of metrics; one that is none is a `DataError` that names it."""
    for number, text in _lines(path):
        line = parse_step_line(text)
        if line is None:
            raise DataError(
                f"{path}, line {number}, is not a step with its metrics: it was damaged, or changed by hand. Mend or "
                f"remove that line; nothing but curves and tables is read from it."
            )
        yield line


def parse_step_line(text: str) -> dict[str, Any] | None:
    """A line as a step with its metrics, if it is one."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    step = line.get("step") if isinstance(line, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not -1 < step < MOST_STEPS:
        return None
    return line if all(_is_value(value) for name, value in line.items() if name not in NON_METRIC_FIELDS) else None


def _is_value(value: Any) -> bool:
    try:
        return value is None or (isinstance(value, int | float) and math.isfinite(value))
    except OverflowError:  # a whole number beyond all that a float holds
        return False


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The whole lines of a file, with their numbers; a torn one at the end is no line."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for number, text in enumerate(file, start=1):
                if text.endswith("\n"):
                    yield number, text


def _cut_torn_line(path: Path) -> None:
    """Shorten the file to its last newline, reading backwards from the end."""
    if not path.exists():
        return
    with path.open("r+b", buffering=0) as file:
        file.truncate(_end_of_last_line(file))


def _end_of_last_line(file: FileIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
