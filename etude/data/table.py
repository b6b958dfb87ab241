"""Rows of one or several files, in their order, some of them left out: what datasets of every kind stand on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate, compress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from etude.config import load_plugin
from etude.data.files import Rows, lookup, names, read, rows_of
from etude.errors import ConfigError, DataError

__all__ = ["SOURCE", "Source", "Table", "opened"]

SOURCE = "data_source"
CHUNK = 1024

Source = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]
"""Files, one after the other, each a path or `module:Name`; or a Python iterable of mappings."""


class Table:
    """Rows of one or several files, in their order. A row is made when it is asked for."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = tuple(parts)
        self._kept: NDArray[np.int64] | None = None
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._kept is None else len(self._kept)

    @property
    def firsts(self) -> list[int]:
        """The row that each file begins with, as long as none was left out."""
        return [0, *self._ends[:-1]]

    def row(self, row: int) -> dict[str, Any]:
        """One row, as plain data."""
        part, index = self._place(row)
        return part.row(index)

    def where(self, row: int) -> str:
        """What an error calls a row: its file and its place there."""
        part, index = self._place(row)
        return f"{part.name}, row {index}"

    def column(self, path: str) -> Iterator[Any]:
        """A column of all rows, read some at a time; None where a row has none."""
        kept = np.full(self._ends[-1], self._kept is None)
        if self._kept is not None:
            kept[self._kept] = True
        for part, end in zip(self._parts, self._ends, strict=True):
            for start in range(0, len(part), CHUNK):
                stop = min(start + CHUNK, len(part))
                mine = kept[end - len(part) :][start:stop]
                yield from compress(part.values(path, start, stop), mine)

    def needed(self, values: Mapping[str, Any], path: str, row: int, remedy: str) -> Any:
        """A column of a row that was named, or has to be there. remedy: how another is named."""
        found = lookup(values, path)
        if found is None and path not in set(names(values)):
            raise DataError(
                f"{self.where(row)} has no column `{path}`; it has {', '.join(names(values))}. "
                f"Say which is meant with `data.columns`, such as `{remedy}`."
            )
        return found

    def only(self, wanted: NDArray[np.bool_]) -> Self:
        """[rows] → the rows that are wanted; the others are no longer counted."""
        rows = np.arange(len(self)) if self._kept is None else self._kept
        other = copy(self)
        other._kept = rows[wanted]
        return other

    def _place(self, row: int) -> tuple[Rows, int]:
        assert 0 <= row < len(self), f"row {row} of {len(self)}"
        place = row if self._kept is None else int(self._kept[row])
        part = bisect_right(self._ends, place)
        return self._parts[part], place - (self._ends[part - 1] if part else 0)


def opened(data: Source) -> list[Rows]:
    """The rows of each file, or of what Python makes.

    `module:Name` is an iterable of mappings, or a function without arguments that returns one.
    """
    given = [data] if isinstance(data, str | Path) else data
    if isinstance(given, Sequence) and all(isinstance(each, str | Path) for each in given):
        if not given:
            raise ConfigError("No data was named. Give at least one file.")
        parts = [_open(str(each)) for each in given]
    else:
        parts = [rows_of(given, "The data given")]
    for part in parts:
        if not len(part):
            raise DataError(f"{part.name} has no rows. Give data with at least one, or leave it out.")
    return parts


def _open(data: str) -> Rows:
    """A path, or `module:Name` where no file is called so."""
    path = Path(data).expanduser()
    if path.exists() or ":" not in data:
        return read(path)
    found = load_plugin(data, None)
    items = found() if callable(found) else found
    if not isinstance(items, Iterable):
        raise ConfigError(
            f"The data `{data}` is of type {type(items).__name__}; it must be an iterable of mappings, or a function "
            f"without arguments that returns one."
        )
    return rows_of(items, data)
