"""Parts of a Markdown page. A text that is put into them can change nothing around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from etude.observe.log import escape_unprintable

SPAN_OR_MARK = re.compile(r"(?<!`)(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)|(?P<mark>[&<\\`\[\]!*_~])")
"""A code span, or a character with a meaning outside of one."""
ENTITIES = {"&": "&amp;", "<": "&lt;"}


def sentence(text: str) -> str:
    """Return a text as one line. Its code spans stay; its HTML, links, pictures and emphasis are text."""
    return SPAN_OR_MARK.sub(_escape, escape_unprintable(" ".join(text.split())))


def code(text: str) -> str:
    """Return a text as one line of code."""
    text = escape_unprintable(" ".join(text.split())) or " "
    ticks = "`" * (_longest_run(text) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{padding}{text}{padding}{ticks}"


def fence(text: str) -> str:
    """Return a text as a block of code, with its lines. Control characters are written as escapes."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    lines = (escape_unprintable(line.replace("\t", "    ")) for line in text.splitlines())
    return "\n".join([f"{ticks}text", *lines, ticks])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown."""
    escaped = ([_escape_pipes(cell) for cell in row] for row in [head, ["---"] * len(head), *rows])
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def bullets(items: Iterable[str]) -> str:
    """Return a list."""
    return "\n".join(f"- {item}" for item in items)


def _escape(found: re.Match[str]) -> str:
    """Return a code span as it is, and a mark as text."""
    mark = found["mark"]
    return found[0] if mark is None else ENTITIES.get(mark) or f"\\{mark}"


def _escape_pipes(cell: str) -> str:
    """Escape the pipes of a cell. A backslash before one would undo that, so a space is put between them."""
    return cell.replace("\\|", "\\ |").replace("|", "\\|")


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
