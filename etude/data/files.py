"""The rows of files, directories and iterables, created on access from Arrow memory instead of Python objects.

Parquet, CSV and `datasets` directories are Arrow tables; a directory is mapped into memory and not read. CSV has no
types, so all its columns are text. JSON rows may differ in their keys. They are kept as JSON text, so that no type is
guessed: "2024-01-01" stays text, and a row without a key does not get it as null.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

import numpy as np

from etude.errors import ConfigError, DataError
from etude.images.encoding import find_data_url
from etude.lazy import LazyModule

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pacsv
    import pyarrow.parquet as pq
else:
    pa, pc, pacsv, pq = map(LazyModule, ("pyarrow", "pyarrow.compute", "pyarrow.csv", "pyarrow.parquet"))

CHUNK_ROWS = 65_536
DATA_SOURCE_COLUMN = "data_source"
_SOURCE_NAME = re.compile(r"[A-Za-z][\w.-]*")


class RowSource(Protocol):
    """The rows of one file."""

    name: str
    """The name of the file in errors."""
    directory: Path | None
    """The directory that paths of images lead into; None for rows without a file."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Return one row as JSON values."""
        ...

    def values(self, path: str, start: int, stop: int) -> list[Any]:
        """Return a column of some rows by its dotted path; None for a row without it."""
        ...

    def tuples(self, paths: Sequence[str], start: int, stop: int) -> Iterable[tuple[Any, ...]]:
        """Return several columns of some rows, row by row."""
        return zip(*(self.values(path, start, stop) for path in paths), strict=True)


class ArrowRows(RowSource):
    """The rows of an Arrow table."""

    def __init__(self, name: str, table: pa.Table, directory: Path | None = None) -> None:
        self.name = name
        self.directory = directory
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        (row,) = self._table.slice(index, 1).to_pylist(maps_as_pydicts="strict")
        return {key: self._to_plain(value, key, index) for key, value in row.items()}

    def values(self, path: str, start: int, stop: int) -> list[Any]:
        """Return a column of some rows, without reading the other columns."""
        top, *rest = [path] if path in self._table.column_names else path.split(".")
        if top not in self._table.column_names:
            return [None] * (stop - start)
        column = self._table.column(top).slice(start, stop - start)
        for name in rest:
            if not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
                return [None] * (stop - start)
            column = pc.struct_field(column, name)
        values = column.to_pylist(maps_as_pydicts="strict")
        return [self._to_plain(value, path, start + i) for i, value in enumerate(values)]

    def _to_plain(self, value: Any, column: str, index: int) -> Any:
        """Return a value as JSON: dates and decimals become text, and the bytes of images data URLs. Other bytes are
        refused."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [self._to_plain(item, column, index) for item in value]
        if isinstance(value, dict):
            return {key: self._to_plain(item, column, index) for key, item in value.items()}
        try:
            return _to_json_value(value)
        except TypeError:
            raise DataError(
                f"{self.name}, row {index} has {type(value).__name__} in the column `{column}`; a task can have text, "
                f"numbers, lists and mappings. Leave the column out of the file, or write it as text."
            ) from None


class JsonRows(RowSource):
    """The rows of JSON data, kept as JSON text."""

    def __init__(self, name: str, texts: pa.ChunkedArray, directory: Path | None = None) -> None:
        self.name = name
        self.directory = directory
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def row(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self._texts[index].as_py())
        return row

    def values(self, path: str, start: int, stop: int) -> list[Any]:
        return [value for (value,) in self.tuples([path], start, stop)]

    def tuples(self, paths: Sequence[str], start: int, stop: int) -> Iterable[tuple[Any, ...]]:
        rows = map(json.loads, self._texts.slice(start, stop - start).to_pylist())
        return [tuple(lookup(row, path) for path in paths) for row in rows]


class NamedRows(RowSource):
    """The rows of a file that a run named as a data source, which each of them has as `data_source`."""

    def __init__(self, source: str, rows: RowSource) -> None:
        self.name = rows.name
        self.directory = rows.directory
        self._source = source
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return self._rows.row(index) | {DATA_SOURCE_COLUMN: self._source}

    def values(self, path: str, start: int, stop: int) -> list[Any]:
        if path == DATA_SOURCE_COLUMN:
            return [self._source] * (stop - start)
        return self._rows.values(path, start, stop)

    def tuples(self, paths: Sequence[str], start: int, stop: int) -> Iterable[tuple[Any, ...]]:
        if DATA_SOURCE_COLUMN in paths:
            return super().tuples(paths, start, stop)
        return self._rows.tuples(paths, start, stop)


def split_source(data: str) -> tuple[str, str]:
    """Return the data source and the file of `maths=tasks.parquet`; an empty source for a file without a name."""
    source, _, file = data.partition("=")
    if not file or not _SOURCE_NAME.fullmatch(source) or Path(data).expanduser().exists():
        return "", data
    return source, file


def with_source(source: str, file: str) -> str:
    """Return the name of a file with its data source, as `split_source` reads it."""
    return f"{source}={file}" if source else file


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at a column's name, or at a dotted path into columns of mappings; None if there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def column_paths(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every dotted path of a row."""
    for key, value in row.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from column_paths(value, f"{prefix}{key}.")


def missing_column(where: str, path: str, row: Mapping[str, Any], remedy: str) -> DataError:
    """Return the error of a row without a column. remedy: an example of an option that names one."""
    return DataError(
        f"{where} has no column `{path}`; it has {', '.join(column_paths(row))}. Name the column with `data.columns`, "
        f"such as `{remedy}`."
    )


def no_such_data(path: Path) -> ConfigError:
    """Return the error of data whose file is not there."""
    return ConfigError(
        f"The data `{path}` was requested, and there is no such file (in {Path.cwd()}). Correct the path."
    )


def read_rows(path: Path) -> RowSource:
    """Open the rows of a file, by its suffix, or of a directory that `datasets` saved."""
    if path.is_dir():
        return _read_saved_dataset(path)
    if not path.exists():
        raise no_such_data(path)
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if suffix not in READERS:
        raise ConfigError(
            f"The data `{path}` was requested, and a file that ends in `{suffix}` cannot be read. "
            f"Give a file that ends in {', '.join(READERS)}, or a directory written by `save_to_disk`."
        )
    try:
        return READERS[suffix](path)
    except (pa.ArrowException, UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} cannot be read as {suffix}: {error}. Write the file again.") from error


def rows_from_iterable(items: Iterable[Any], name: str, directory: Path | None = None) -> RowSource:
    """Read the rows of a Python iterable of mappings, once and to its end."""

    def texts() -> Iterator[str]:
        for index, row in enumerate(items):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{name}, row {index} is of type {type(row).__name__}; each row must be a mapping from column "
                    f"names."
                )
            yield row_to_json(row, f"{name}, row {index}")

    return JsonRows(name, _to_chunks(texts()), directory)


def row_to_json(row: Mapping[str, Any], where: str) -> str:
    """Return a row of a program as JSON, with data URLs for images of Pillow and the bytes of images. where: its name
    in errors."""
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_to_json_value)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} cannot be written as JSON: {error}. A task can have text, numbers, lists, mappings and images: "
            "leave other columns out."
        ) from error


def _to_json_value(value: Any) -> Any:
    """Convert values of Arrow, NumPy, Pillow and Python that JSON does not have."""
    if (url := find_data_url(value)) is not None:
        return url
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID | timedelta):
        return str(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"it holds a value of type {type(value).__name__}")


def _to_chunks(texts: Iterable[str]) -> pa.ChunkedArray:
    """Copy texts into Arrow memory, one chunk at a time."""
    chunks: list[pa.Array] = []
    pending: list[str] = []
    for text in texts:
        pending.append(text)
        if len(pending) == CHUNK_ROWS:
            chunks.append(_to_arrow(pending))
            pending.clear()
    return pa.chunked_array([*chunks, _to_arrow(pending)])


def _to_arrow(texts: Sequence[str]) -> pa.Array:
    """Build an Arrow array of texts from its buffers: `pyarrow.array` would load pandas to check the list's type."""
    encoded = [text.encode() for text in texts]
    ends = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in encoded], out=ends[1:])
    return pa.LargeStringArray.from_buffers(len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


# -- the formats ------------------------------------------------------------------------------------------------------


def _read_csv(path: Path) -> RowSource:
    parsing = pacsv.ParseOptions(newlines_in_values=True)
    with pacsv.open_csv(path, parse_options=parsing) as reader:
        columns = reader.schema.names
    text = pacsv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=False)
    return ArrowRows(str(path), pacsv.read_csv(path, parse_options=parsing, convert_options=text), path.parent)


def _read_json_lines(path: Path) -> RowSource:
    opened = gzip.open if path.suffix == ".gz" else open

    def texts() -> Iterator[str]:
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    _check_row(line, f"{path}, line {number}")
                    yield line

    return JsonRows(str(path), _to_chunks(texts()), path.parent)


def _read_json(path: Path) -> RowSource:
    """Read a list of rows, or one row over several lines. A file that is neither is read as one row per line."""
    with path.open(encoding="utf-8-sig") as file:
        if not _is_multiline(next((line for line in file if line.strip()), "")):
            return _read_json_lines(path)
        file.seek(0)
        try:
            rows: Sequence[Any] | Mapping[str, Any] = json.load(file)
        except json.JSONDecodeError as error:
            raise DataError(f"{path} is not JSON: {error}. Write the file again.") from error
    return rows_from_iterable([rows] if isinstance(rows, Mapping) else rows, str(path), path.parent)


def _is_multiline(first: str) -> bool:
    """Return True if a list, or a row that the line does not end, begins on the first line."""
    if first.lstrip().startswith("["):
        return True
    try:
        json.loads(first)
    except json.JSONDecodeError as error:
        return first.lstrip().startswith("{") and error.pos >= len(first.rstrip()) - 1
    return False


def _check_row(text: str, where: str) -> None:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}. Each line must hold one whole row.") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where} holds a value of type {type(row).__name__}; each line must hold a mapping from column names."
        )


READERS: dict[str, Callable[[Path], RowSource]] = {
    ".parquet": lambda path: ArrowRows(str(path), pq.read_table(path, memory_map=True), path.parent),
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
}


def _read_saved_dataset(path: Path) -> RowSource:
    """Map a directory into memory that `datasets` wrote with `save_to_disk`."""
    splits = path / "dataset_dict.json"
    if splits.exists():
        names = ", ".join(f"`{path / split}`" for split in json.loads(splits.read_text())["splits"])
        raise ConfigError(f"The data `{path}` holds several splits. Name one of them: {names}.")
    if not (path / "state.json").exists():
        raise ConfigError(
            f"The data `{path}` is a directory without a `state.json`, so `save_to_disk` did not write it. "
            f"Name the files in it instead."
        )
    files = [path / entry["filename"] for entry in json.loads((path / "state.json").read_text())["_data_files"]]
    missing = [file for file in files if not file.exists()]
    if missing:
        raise DataError(f"The data `{path}` is not whole: `{missing[0].name}` is missing. Save it again.")
    tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
    return ArrowRows(str(path), pa.concat_tables(tables), path)
