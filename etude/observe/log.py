"""The log: what is said in words rather than in numbers.

Every room asks for its logger with `get_logger("store")` and all of them hang below the one logger named `etude`. A
command calls `configure_logging` once; a program that uses Etude as a library need not, and then Python's own defaults
apply. Nothing here touches the root logger or another library's handlers.

    21:04:11 trainer[3] INFO  the reference model is on the CPU

A message is one line, whatever stands in it, and moves no cursor: what is not printed as a character is written as
Python escapes it (`\\n`, `\\x9b`, `\\u2028`). A traceback has lines of its own, each indented.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

__all__ = ["LogLevel", "configure_logging", "escape_unprintable", "get_logger"]

LogLevel = Literal["debug", "info", "warning", "error"]

_ROOT = logging.getLogger("etude")


def get_logger(package: str) -> logging.Logger:
    """The logger of one room: `get_logger("store")` is the standard library's `etude.store`."""
    log = _ROOT.getChild(package)
    log.addFilter(_ONE_LINE)  # of all that is said there, wherever it goes; a filter that is there is not added again
    return log


def escape_unprintable(text: str) -> str:
    """A text in one line: without control characters, separators other than a space, and halves of characters."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def configure_logging(
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
    handlers: list[logging.Handler] = [_StderrHandler()]
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


class _SingleLineFilter(logging.Filter):
    """Escapes what a record says, in its place, before any handler sees it."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # a mistake of ours, of which logging itself tells
            return True
        if not message.isprintable():
            record.msg, record.args = escape_unprintable(message), ()
        if record.exc_info and not record.exc_text:
            lines = logging.Formatter().formatException(record.exc_info).splitlines()
            record.exc_text = "\n".join(f"  {escape_unprintable(line)}" for line in lines)
        return True


_ONE_LINE = _SingleLineFilter()


class _Formatter(logging.Formatter):
    """`time role[rank] LEVEL message`, masked as a whole."""

    def __init__(self, process: str, mask: Callable[[str], str]) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)-5s %(message)s", datefmt="%H:%M:%S")
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        _ONE_LINE.filter(record)  # of a logger that was not had by `get_logger`
        return self._mask(super().format(record))


class _StderrHandler(logging.Handler):
    """Writes to whatever standard error is at that moment, so that lines appear above a live progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)
