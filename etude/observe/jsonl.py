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
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path

from etude.observe.sinks import RunInfo

__all__ = ["NUMBERS", "JsonlSink", "last_step"]

NUMBERS = "metrics.jsonl"
_BLOCK = 1 << 16


class JsonlSink:
    """Writes `metrics.jsonl` in the run directory."""

    name = "jsonl"

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now

    def open(self, run: RunInfo) -> None:
        """Open for appending, after cutting off a line that was torn."""
        run.directory.mkdir(parents=True, exist_ok=True)
        path = run.directory / NUMBERS
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one whole line."""
        line: dict[str, object] = {"step": step, "time": self._now()}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def last_step(directory: Path) -> int:
    """The last step that has its line in this run directory; -1 where none has."""
    path = directory / NUMBERS
    _cut_torn_line(path)
    last = -1
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                last = max(last, json.loads(line)["step"])
    return last


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
