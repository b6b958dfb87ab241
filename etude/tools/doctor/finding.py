"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Grade: TypeAlias = Literal["ok", "warn", "fail"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One result of a check."""

    name: str
    grade: Grade
    """`warn`: a run works, but not well. `fail`: a run cannot work."""
    what: str
    """The observation, in a sentence."""
    remedy: str = ""
    """The remedy; empty if none is needed."""


def ok(name: str, what: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, "ok", what)


def warn(name: str, what: str, remedy: str) -> Finding:
    """Return a problem with which a run still works."""
    return Finding(name, "warn", what, remedy)


def fail(name: str, what: str, remedy: str) -> Finding:
    """Return a problem with which a run cannot work."""
    return Finding(name, "fail", what, remedy)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
