"""JSON values, checked when they enter the store."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from etude.errors import DataError, RewardError

to_json = json.JSONEncoder(separators=(",", ":")).encode
"""Encode a plain value as compact JSON."""


def check_finite(value: float, where: str) -> float:
    """Return a reward, which must be finite."""
    if not math.isfinite(value):
        raise RewardError(f"{where} is {value}; a reward must be a finite number.")
    return float(value)


def to_json_value(value: Any, where: str) -> Any:
    """Return a copy as JSON values. Numbers and arrays of numpy become Python's; other types are refused."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if bad_keys := [key for key in value if not isinstance(key, str)]:
            raise DataError(f"{where} has the key {bad_keys[0]!r}; in a journal every key must be text.")
        return {key: to_json_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, np.generic | np.ndarray) and not isinstance(value, np.longdouble | np.clongdouble):
        return to_json_value(value.tolist(), where)
    raise DataError(
        f"{where} is of type {type(value).__name__}, which a journal cannot store; it takes text, numbers, lists and "
        "mappings. Drop the column, or convert it."
    )
