"""Values as JSON has them, checked where they come in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from etude.errors import DataError, RewardError

__all__ = ["at_least_one", "bounded", "finite", "plain"]


def finite(value: float, where: str) -> float:
    """A reward, which is a finite number."""
    if not math.isfinite(value):
        raise RewardError(f"{where} is {value}; a reward must be a finite number.")
    return float(value)


def plain(value: Any, where: str) -> Any:
    """A copy as JSON has it: numpy's numbers and arrays become Python's, and what JSON cannot hold is named."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise DataError(f"{where} has the key {odd[0]!r}, which is not text; in a journal every key is text.")
        return {key: plain(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, f"{where}[{place}]") for place, entry in enumerate(value)]
    if isinstance(value, np.generic | np.ndarray) and not isinstance(value, np.longdouble | np.clongdouble):
        return plain(value.tolist(), where)
    raise DataError(
        f"{where} is a {type(value).__name__}, which a journal cannot hold: it takes text, numbers, lists and "
        "mappings. Drop the column, or convert it."
    )


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
