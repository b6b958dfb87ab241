"""The rows of one or more files, in order and without those left out: the base of all datasets."""

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
from etude.data.files import NamedRows, RowSource, read_rows, rows_from_iterable, split_source
from etude.errors import ConfigError, DataError

CHUNK = 1024

DatasetLike = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]
"""Files in order, each a path or `module:Name`; or a Python iterable of mappings."""


class RowTable:
    """The rows of one or more files, in order. A row is created on access."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = tuple(sources)
        self._indices: NDArray[np.int64] | None = None
        self._ends = list(accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1] if self._indices is None else len(self._indices)

    @property
    def first_rows(self) -> list[int]:
        """The first row of each file. Only valid while no row is left out."""
        return [0, *self._ends[:-1]]

    def row(self, row: int) -> dict[str, Any]:
        """Return one row as JSON values."""
        source, index = self._locate(row)
        return source.row(index)

    def location(self, row: int) -> str:
        """Return the name of a row in errors: its file and its index there."""
        source, index = self._locate(row)
        return f"{source.name}, row {index}"

    def directory(self, row: int) -> Path | None:
        """Return the directory that paths of a row's images lead into; None if its data are no file."""
        return self._locate(row)[0].directory

    def column(self, path: str) -> Iterator[Any]:
        """Yield a column of all rows, read in chunks; None for a row without it."""
        return (value for (value,) in self.columns([path]))

    def columns(self, paths: Sequence[str], chunk: int = CHUNK) -> Iterator[tuple[Any, ...]]:
        """Yield several columns of all rows, row by row. chunk: the rows that are in memory at a time."""
        selected = np.full(self._ends[-1], self._indices is None)
        if self._indices is not None:
            selected[self._indices] = True
        for source, end in zip(self._sources, self._ends, strict=True):
            for start in range(0, len(source), chunk):
                stop = min(start + chunk, len(source))
                mask = selected[end - len(source) :][start:stop]
                yield from compress(source.tuples(paths, start, stop), mask)

    def select(self, mask: NDArray[np.bool_]) -> Self:
        """Return a table of the rows that the mask [rows] selects. Row numbers then count these rows alone."""
        rows = np.arange(len(self)) if self._indices is None else self._indices
        other = copy(self)
        other._indices = rows[mask]
        return other

    def _locate(self, row: int) -> tuple[RowSource, int]:
        assert 0 <= row < len(self), f"row {row} of {len(self)}"
        position = row if self._indices is None else int(self._indices[row])
        number = bisect_right(self._ends, position)
        return self._sources[number], position - (self._ends[number - 1] if number else 0)


def open_sources(data: DatasetLike) -> list[RowSource]:
    """Open the rows of each file, or of a Python iterable.

    `module:Name` names an iterable of mappings, or a function without arguments that returns one. `maths=tasks.parquet`
    gives all rows of a file the data source `maths`.
    """
    items = [data] if isinstance(data, str | Path) else data
    if isinstance(items, Sequence) and all(isinstance(item, str | Path) for item in items):
        if not items:
            raise ConfigError("No data was named. Name at least one file.")
        sources = [_open_source(str(item)) for item in items]
    else:
        sources = [rows_from_iterable(items, "The data given")]
    for source in sources:
        if not len(source):
            raise DataError(f"{source.name} has no rows. Give data with at least one, or leave it out.")
    return sources


def _open_source(data: str) -> RowSource:
    """Open a path, or `module:Name` if no file has that name; both may have a data source before them, and `=`."""
    source, data = split_source(data)
    rows = _open_unnamed(data)
    return NamedRows(source, rows) if source else rows


def _open_unnamed(data: str) -> RowSource:
    path = Path(data).expanduser()
    if path.exists() or ":" not in data:
        return read_rows(path)
    loaded = load_plugin(data, None)
    items = loaded() if callable(loaded) else loaded
    if not isinstance(items, Iterable):
        raise ConfigError(
            f"The data `{data}` is of type {type(items).__name__}; it must be an iterable of mappings, or a function "
            f"without arguments that returns one."
        )
    return rows_from_iterable(items, data)
