"""Turn docstrings, descriptions and comments into Markdown."""

from __future__ import annotations

import re
from inspect import cleandoc
from textwrap import dedent

__all__ = ["cell", "docstring", "first_paragraph", "linked", "note", "prose"]

PAPER = re.compile(r"(?<![\w./-])(?:arXiv[ :])?(\d{4}\.\d{4,5})(?![\w.]*\d)")
OPENS = re.compile(r"^(Sources?:|Ours:)", flags=re.MULTILINE)
"""The beginnings of the parts of a docstring that are paragraphs."""


def note(module: str) -> str:
    """Return the note of a page that is written by a program."""
    return f"<!-- Written by `python -m {module}`; do not edit by hand. -->"


def linked(text: str) -> str:
    """Return a text whose papers are links."""
    return PAPER.sub(lambda match: f"[arXiv {match[1]}](https://arxiv.org/abs/{match[1]})", text)


def prose(text: str) -> str:
    """Return a text as Markdown that shows its characters: a formula's signs are no markup. Text in `backticks`
    stays."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(part if part.startswith("`") else linked(_escaped(part)) for part in parts)


def cell(text: str) -> str:
    """Return a text as it can stand in a table."""
    return prose(" ".join(text.split())).replace("|", "\\|")


def first_paragraph(thing: object) -> str:
    """Return the first paragraph of a docstring as it can stand in a table."""
    return cell(cleandoc(thing.__doc__ or "").split("\n\n")[0])


def docstring(thing: object) -> str:
    """Return a docstring as Markdown: paragraphs, with indented lines as they are."""
    text = cleandoc(thing.__doc__ or "")
    blocks = []
    for block in re.split(r"\n\s*\n", OPENS.sub(r"\n\1", text)):
        if block.startswith("    "):
            blocks.append(f"```text\n{dedent(block).rstrip()}\n```")
        elif block.strip():
            blocks.append(OPENS.sub(r"**\1**", prose(block.strip())))
    return "\n\n".join(blocks)


def _escaped(text: str) -> str:
    return re.sub(r"([*<\[\]])", lambda match: {"<": "&lt;"}.get(match[1], "\\" + match[1]), text)
