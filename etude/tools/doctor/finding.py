"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["GIB", "Finding", "Grade", "fail", "ok", "warn"]

Grade: TypeAlias = Literal["ok", "warn", "fail"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    grade: Grade
    """`warn` where a run works and suffers, `fail` where it cannot work."""
    what: str
    """What was found, in a sentence."""
    remedy: str = ""
    """What to do about it; empty where nothing need be done."""


def ok(name: str, what: str) -> Finding:
    """It is as it should be."""
    return Finding(name, "ok", what)


def warn(name: str, what: str, remedy: str) -> Finding:
    """A run works, and suffers."""
    return Finding(name, "warn", what, remedy)


def fail(name: str, what: str, remedy: str) -> Finding:
    """A run cannot work."""
    return Finding(name, "fail", what, remedy)
