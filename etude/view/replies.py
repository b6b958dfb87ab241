"""The forms of a reply: JSON of a record, CSV of a table, and columns as bytes.

JSON escapes every character beyond ASCII, and CSV every control character. So a rollout's text can neither end a
script nor control a terminal that prints a reply.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_EXACT = 2**53
"""The largest integer up to which JavaScript has all. The rollouts of evaluations have larger ids."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FORMULA = ("=", "+", "-", "@")
"""First characters of a text that a spreadsheet would compute."""


@dataclass(frozen=True)
class Table:
    """Columns of equal length, by name."""

    columns: Mapping[str, Sequence[Any] | NDArray[Any]]

    def __post_init__(self) -> None:
        lengths = {len(column) for column in self.columns.values()}
        assert len(lengths) < 2, f"columns of different lengths: {sorted(lengths)}"


def to_json(record: Any) -> bytes:
    """Return a record as JSON. A number that is not finite becomes null; one that JavaScript would round, a text."""
    return json.dumps(_plain(record), allow_nan=False, separators=(",", ":")).encode()


def describe_error(sentence: str, accept: str) -> tuple[bytes, str]:
    """Return the body of an error and its media type. A page for a browser, JSON for a program.

    accept: the header `Accept` of the request.
    """
    if "text/html" not in accept:
        return to_json({"error": sentence}), "application/json"
    page = f'<!doctype html><html lang="en"><title>Etude</title><p>{html.escape(sentence)}</p></html>'
    return page.encode(), "text/html; charset=utf-8"


def to_csv(table: Table) -> bytes:
    """Return a table as CSV with a line of names."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(table.columns)
    columns = [_plain(column) for column in table.columns.values()]
    for row in zip(*columns, strict=True):
        writer.writerow([_cell(value) for value in row])
    return file.getvalue().encode()


def pack_columns(head: Mapping[str, Any], columns: Mapping[str, NDArray[Any]]) -> bytes:
    """Return columns as bytes, behind a head that says where each is.

    The first four bytes are the length of the head, little-endian. The head is JSON; its `columns` has the type, the
    offset and the number of values of each column. Offsets count from the end of the head, and are multiples of 8.
    """
    described: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, column in columns.items():
        data = np.ascontiguousarray(column).astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
        described[name] = {"type": column.dtype.name, "offset": offset, "count": len(column)}
        padding = -len(data) % 8
        parts += [data, b"\0" * padding]
        offset += len(data) + padding
    encoded = to_json({**head, "columns": described})
    encoded += b" " * (-(len(encoded) + 4) % 8)
    return b"".join((struct.pack("<I", len(encoded)), encoded, *parts))


def _plain(value: Any) -> Any:
    """Return a value as JSON values."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) > LARGEST_EXACT:
        return str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            plain = value.astype(object)
            plain[~np.isfinite(value)] = None
            return plain.tolist()
        return [_plain(item) for item in value.tolist()] if value.dtype.kind == "O" else value.tolist()
    if isinstance(value, Table):
        return {name: _plain(column) for name, column in value.columns.items()}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    assert isinstance(value, Path), f"{type(value).__name__} has no form in JSON"
    return str(value)


def _cell(value: Any) -> Any:
    """Return a cell of a CSV file; a text is made harmless for terminals and spreadsheets."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    return f"'{text}" if text.startswith(_FORMULA) else text
