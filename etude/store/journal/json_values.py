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
NOTE_BYTES, NOTE_VALUES = 2**20, 20_000
"""Bytes and values of one note of an agent or a runner."""


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


def json_size(value: Any, name: str, max_bytes: int = NOTE_BYTES, max_values: int = NOTE_VALUES) -> int:
    """Return about how many bytes of JSON a value takes; raise `DataError` if it is larger than this."""
    stack = [value]
    size = 0
    count = 0
    while stack:
        item = stack.pop()
        count, size = count + 1, size + _size(item)
        if isinstance(item, Mapping):
            size += sum(map(_size, item))
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        if size > max_bytes or count + len(stack) > max_values:
            raise DataError(
                f"{name} is too large: at most {max_bytes} bytes of JSON and {max_values} values in lists and objects "
                "are stored. Send less, or split it."
            )
    return size


def _size(value: Any) -> int:
    """Return about how many bytes of JSON a value takes, without its items."""
    if isinstance(value, str):
        return len(value) + 2 if value.isascii() else len(value.encode(errors="replace")) + 2
    return 1 + value.bit_length() // 4 if isinstance(value, int) else 2
