"""Writers of rows: in batches, atomic, and never over an existing file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import ConfigError

MOST_ROWS, MOST_TOKENS = 1024, 2**18
"""The most rows, and about the most tokens, of a written batch."""


@contextmanager
def open_writer(path: Path, schema: pa.Schema | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes one row: to Parquet, or as a line of JSON. The file gets its name at the end.

    schema: the columns of a Parquet file; JSON needs none.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already. Give another name, or move it away.")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    try:
        with _write_parquet(draft, schema) if path.suffix == ".parquet" else _write_lines(draft) as write:
            yield write
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _write_lines(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    def write(row: dict[str, Any]) -> None:
        try:
            line = _json(row)
        except ValueError:
            line = _json(_without_nonfinite(row))
        file.write(line + "\n")

    with path.open("w", encoding="utf-8") as file:
        yield write


@contextmanager
def _write_parquet(path: Path, schema: pa.Schema) -> Iterator[Callable[[dict[str, Any]], None]]:
    rows, tokens = list[dict[str, Any]](), 0

    def write(row: dict[str, Any]) -> None:
        nonlocal tokens
        rows.append(row)
        tokens += _size(row)
        if len(rows) >= MOST_ROWS or tokens >= MOST_TOKENS:
            flush()

    def flush() -> None:
        nonlocal tokens
        if rows:
            file.write_table(pa.Table.from_pylist(rows, schema))
        rows.clear()
        tokens = 0

    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        yield write
        flush()


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


def _size(value: Any) -> int:
    """Return about the number of tokens in a row: the lengths of its lists and texts."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sum(map(_size, value))
    return len(value) if isinstance(value, list | str) else 1
