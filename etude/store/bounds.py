"""What is asked of a desk is bounded, wherever the desk is."""

from __future__ import annotations

import math

from etude.errors import DataError

__all__ = ["at_least_one", "bounded"]


def bounded(seconds: float, name: str) -> float:
    """How long somebody waits at most."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise DataError(f"{name} is {seconds}; every wait is bounded: give a number of seconds, 0 or more.")
    return seconds


def at_least_one(count: int, name: str) -> int:
    """How many somebody wants at most."""
    if count < 1:
        raise DataError(f"{name} is {count}; it must be 1 or more.")
    return count
