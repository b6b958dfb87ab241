"""The sink that every run has: one JSON object per line in `metrics.jsonl`.

    {"step": 3, "time": 1795210221.77, "loss": 0.43, "kl": null, "nonfinite": ["kl"]}

Each line goes to the operating system when its step ends. A killed process leaves whole lines and at most one partial
line at the end, which is removed when the file is opened again. JSON has no NaN and no infinity: such a value becomes
null, and its name is listed. A resumed run appends after the last written step. A line with `"late": true` adds to an
earlier step what was measured after it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from etude.errors import DataError
from etude.integrity import add_path_to_errors
from etude.observe.log import get_logger
from etude.observe.sinks import RunInfo, Sink

METRICS_FILE = "metrics.jsonl"
NON_METRIC_FIELDS = frozenset({"step", "time", "nonfinite", "late"})
"""The fields of a line that are not metrics."""
MOST_STEPS = 2**53
_BLOCK = 1 << 16


class JsonlSink(Sink):
    """A sink that writes `metrics.jsonl` in the run directory. The journal has all rollouts."""

    name = "jsonl"

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now

    def open(self, run: RunInfo) -> None:
        """Remove a partial last line, and open the file for appending."""
        run.directory.mkdir(parents=True, exist_ok=True)
        path = run.directory / METRICS_FILE
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        line: dict[str, object] = {"step": step, "time": self._now()}
        if late:
            line["late"] = True
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        if nonfinite:
            line["nonfinite"] = nonfinite
        with add_path_to_errors(Path(self._file.name)):
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_last_step(directory: Path) -> int:
    """Return the last step with a line in this run directory; -1 for none.

    A damaged line is logged and skipped, because training does not depend on this file.
    """
    path = directory / METRICS_FILE
    _cut_torn_line(path)
    last = -1
    for number, text in _lines(path):
        line = parse_step_line(text)
        if line is None:
            message = "%s, line %d, is not a step with its metrics: it was damaged or edited, and is skipped."
            get_logger("observe").warning(message, path, number)
        else:
            last = max(last, line["step"])
    return last


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the steps in a metrics file; raise a `DataError` that names a damaged line."""
    for number, text in _lines(path):
        line = parse_step_line(text)
        if line is None:
            raise DataError(
                f"{path}, line {number}, is not a step with its metrics: it was damaged or edited. Repair or remove "
                f"that line; only curves and tables are read from it."
            )
        yield line


def parse_step_line(text: str) -> dict[str, Any] | None:
    """Parse a line as a step with its metrics; return None for any other line."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    step = line.get("step") if isinstance(line, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not -1 < step < MOST_STEPS:
        return None
    return line if all(_is_value(value) for name, value in line.items() if name not in NON_METRIC_FIELDS) else None


class LinePosition(NamedTuple):
    """A place between two lines of a growing file, and the line before it, which another file does not have there."""

    offset: int = 0
    line: bytes = b""


def read_new_lines(path: Path, known: LinePosition, tail: int | None = None) -> tuple[list[str], LinePosition, bool]:
    """Return the whole lines after a position, the position after them, and True if another file has its place.

    tail: the bytes that are read at the end of a file that is new; None for all.
    """
    start, line = known
    try:
        with path.open("rb") as file:
            file.seek(start - len(line))
            is_other = file.read(len(line)) != line
            if is_other or not start:
                start, line = 0 if tail is None else max(0, file.seek(0, os.SEEK_END) - tail), b""
                file.seek(start)
            whole, newline, _ = file.read().rpartition(b"\n")  # the rest is empty, or being written
    except (FileNotFoundError, NotADirectoryError):
        return [], LinePosition(), True
    if not newline:
        return [], LinePosition(start, line), is_other
    lines = whole.split(b"\n")
    position = LinePosition(start + len(whole) + 1, lines[-1] + newline)
    return [text.decode(errors="replace") for text in lines], position, is_other


def _is_value(value: Any) -> bool:
    try:
        return value is None or (isinstance(value, int | float) and math.isfinite(value))
    except OverflowError:  # an integer larger than any float
        return False


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over the lines of a file with their numbers, without a partial last line."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for number, text in enumerate(file, start=1):
                if text.endswith("\n"):
                    yield number, text


def _cut_torn_line(path: Path) -> None:
    """Truncate the file after its last newline, which is searched backwards from the end."""
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
