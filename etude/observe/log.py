"""The log: what is said in words rather than in numbers.

Every room asks for its logger with `get_log("store")` and all of them hang below the one logger named `etude`. A
command calls `configure` once; a program that uses Etude as a library need not, and then Python's own defaults
apply. Nothing here touches the root logger or another library's handlers.

    21:04:11 trainer[3] INFO  the reference model is on the CPU
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

__all__ = ["LogLevel", "configure", "get_log"]

LogLevel = Literal["debug", "info", "warning", "error"]

_ROOT = logging.getLogger("etude")


def get_log(room: str) -> logging.Logger:
    """The logger of one room: `get_log("store")` is the standard library's `etude.store`."""
    return _ROOT.getChild(room)


def configure(
    level: LogLevel,
    role: str = "main",
    rank: int = 0,
    file: Path | None = None,
    mask: Callable[[str], str] = str,
) -> None:
    """Send Etude's log to standard error, and to `file` if one is given; calling it again starts over.

    `role` and `rank` say who speaks. `mask` is applied to every finished line, tracebacks included, and takes out
    what must not be seen.
    """
    handlers: list[logging.Handler] = [_StandardError()]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for old in list(_ROOT.handlers):
        _ROOT.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(_Formatter(f"{role}[{rank}]", mask))
        _ROOT.addHandler(handler)
    _ROOT.setLevel(level.upper())
    _ROOT.propagate = False


class _Formatter(logging.Formatter):
    """`time role[rank] LEVEL message`, masked as a whole."""

    def __init__(self, speaker: str, mask: Callable[[str], str]) -> None:
        super().__init__(f"%(asctime)s {speaker} %(levelname)-5s %(message)s", datefmt="%H:%M:%S")
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        return self._mask(super().format(record))


class _StandardError(logging.Handler):
    """Writes to whatever standard error is at that moment, so that lines appear above a live progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)
