"""The bounds of the values that a rollout queue takes. A server checks them before it calls the queue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from etude.errors import DataError


@dataclass(frozen=True)
class Bounds:
    """The bounds of a value, as a part of its type: `Annotated[int, Bounds(ge=0)]`. None is no bound."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None


MAX_ITEMS = 1000
"""Items in one request. A longer list is split."""
LONGEST_POLL_S = 30.0
"""Longest wait of one request, in seconds. A longer wait takes several requests."""
MAX_LEASE_S = 3600.0
"""Longest lease of a run, in seconds."""

Id: TypeAlias = Annotated[int, Bounds(ge=0, lt=2**63)]
Number: TypeAlias = Annotated[int, Bounds(ge=-(2**63), lt=2**63)]
Version: TypeAlias = Annotated[int, Bounds(ge=1, lt=2**31)]
Count: TypeAlias = Annotated[int, Bounds(ge=1, le=MAX_ITEMS)]
Seconds: TypeAlias = Annotated[float, Bounds(gt=0, le=1e9)]
PollSeconds: TypeAlias = Annotated[float, Bounds(ge=0, le=LONGEST_POLL_S)]
LeaseSeconds: TypeAlias = Annotated[float, Bounds(ge=0, le=MAX_LEASE_S)]
Name: TypeAlias = Annotated[str, Bounds(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Digest: TypeAlias = Annotated[str, Bounds(pattern="^[0-9a-f]{64}$")]
Text: TypeAlias = Annotated[str, Bounds(max_length=1_000_000)]
SomeText: TypeAlias = Annotated[str, Bounds(min_length=1, max_length=1_000_000)]


def check_seconds(seconds: float, name: str) -> float:
    """Return the duration of a wait, which must be finite and not negative."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise DataError(f"{name} is {seconds}; every wait must be bounded: give a number of seconds, 0 or more.")
    return seconds


def check_count(count: int, name: str) -> int:
    """Return a count, which must be 1 or more."""
    if count < 1:
        raise DataError(f"{name} is {count}; it must be 1 or more.")
    return count
