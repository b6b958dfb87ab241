"""Rows become a file: some at a time, whole or not there, and never over one that is there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import ConfigError

__all__ = ["RowWriter", "atomic_path", "open_writer"]

MOST_ROWS, MOST_TOKENS = 1024, 2**18
"""After so many rows, or about so many tokens, what was collected is written out."""


class RowWriter(Protocol):
    """Whoever writes rows."""

    def write(self, row: dict[str, Any]) -> None:
        """One more."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class JsonlWriter:
    """JSON, an object a line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """One more line."""
        try:
            line = _json(row)
        except ValueError:
            line = _json(_without_nonfinite(row))
        self._file.write(line + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _without_nonfinite(value: Any) -> Any:
    """The same, with nothing in place of what JSON has no number for: tasks and notes may hold NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _without_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    return value


def _json(row: Any) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class ParquetWriter:
    """Parquet."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file, self._schema = pq.ParquetWriter(path, schema, compression="zstd"), schema
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def write(self, row: dict[str, Any]) -> None:
        """One more row."""
        self._rows.append(row)
        self._tokens += _size(row)
        if len(self._rows) >= MOST_ROWS or self._tokens >= MOST_TOKENS:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        if self._rows:
            self._file.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows, self._tokens = [], 0


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_size(item) for item in value.values())
    if isinstance(value, list):
        return sum(_size(item) for item in value) if value and isinstance(value[0], dict) else len(value)
    return len(value) if isinstance(value, str) else 1


def open_writer(path: Path, suffix: str, schema: pa.Schema | None) -> RowWriter:
    """Whoever writes this kind of file."""
    if suffix == ".parquet":
        assert schema is not None, "only sets are tables"
        return ParquetWriter(path, schema)
    return JsonlWriter(path)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Where to write a file that is not there until it is whole."""
    if path.exists():
        raise ConfigError(f"{path} is there already. Give another name, or move it away.")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
