"""Writers of rows: in batches, atomic, and never over an existing file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import to_json

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
    with path.open("wb") as file:

        def write(row: dict[str, Any]) -> None:
            # Tasks and notes may have NaN and infinities, and JSON does not.
            file.write(to_json(row, inf_nan_mode="null") + b"\n")

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


def _size(value: Any) -> int:
    """Return about the number of tokens in a row: the lengths of its lists and texts."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sum(map(_size, value))
    return len(value) if isinstance(value, list | str) else 1
