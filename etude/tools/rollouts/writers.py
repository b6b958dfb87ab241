"""Writers of rows: in batches, atomic, and never over an existing file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import ConfigError

MOST_ROWS, MOST_TOKENS = 1024, 2**18
"""The most rows, and about the most tokens, of a written batch."""


class RowWriter(Protocol):
    """A writer of rows."""

    def write(self, row: dict[str, Any]) -> None:
        """Write one row."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...


class JsonlWriter:
    """A writer of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Write one line."""
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
    """Replace NaN and infinities by None: tasks and notes may have them, and JSON does not."""
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
    """A writer of Parquet files."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file, self._schema = pq.ParquetWriter(path, schema, compression="zstd"), schema
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def write(self, row: dict[str, Any]) -> None:
        """Add one row to the batch, and write the batch when it is full."""
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
    """Open a writer for a file of this suffix."""
    if suffix == ".parquet":
        assert schema is not None, "Parquet needs a schema"
        return ParquetWriter(path, schema)
    return JsonlWriter(path)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a draft path to write to, and rename it to `path` at the end."""
    if path.exists():
        raise ConfigError(f"{path} exists already. Give another name, or move it away.")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
