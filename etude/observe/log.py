"""The log messages of Etude.

Every package gets its logger with `get_logger("store")`; all of them are children of the logger `etude`. A command
calls `configure_logging` once. A program that uses Etude as a library need not; Python's defaults apply then. The root
logger and the handlers of other libraries are not touched.

    21:04:11 trainer[3] INFO  the reference model is on the CPU

A message is always one line and cannot move the cursor: unprintable characters are written as Python escapes (`\\n`,
`\\x9b`, `\\u2028`). A traceback follows on its own indented lines.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]

_ROOT = logging.getLogger("etude")


def get_logger(package: str) -> logging.Logger:
    """Return the logger of a package: `get_logger("store")` is the standard library's logger `etude.store`."""
    log = _ROOT.getChild(package)
    log.addFilter(_ONE_LINE)  # before every handler; adding the same filter twice has no effect
    return log


def escape_unprintable(text: str) -> str:
    """Escape control characters, separators other than a space, and lone surrogates, so that a text is one line."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def configure_logging(
    level: LogLevel, role: str = "main", rank: int = 0, file: Path | None = None, mask: Callable[[str], str] = str
) -> None:
    """Send Etude's log to standard error, and to `file`. A second call replaces the first.

    role, rank: the process that logs, printed in each line. mask: a function that removes secrets from every finished
    line, tracebacks included.
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
    """A filter that escapes a record's message in place, before any handler sees it."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # a bug of Etude, which logging itself reports
            return True
        if not message.isprintable():
            record.msg = escape_unprintable(message)
            record.args = ()
        if record.exc_info and not record.exc_text:
            lines = logging.Formatter().formatException(record.exc_info).splitlines()
            record.exc_text = "\n".join(f"  {escape_unprintable(line)}" for line in lines)
        return True


_ONE_LINE = _SingleLineFilter()


class _Formatter(logging.Formatter):
    """The format `time role[rank] LEVEL message`, with masked secrets."""

    def __init__(self, process: str, mask: Callable[[str], str]) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)-5s %(message)s", datefmt="%H:%M:%S")
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        _ONE_LINE.filter(record)  # for loggers that `get_logger` did not create
        return self._mask(super().format(record))


class _StderrHandler(logging.Handler):
    """A handler that writes to the current `sys.stderr`, so that lines appear above a live progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)
