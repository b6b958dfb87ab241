"""The writer of prepared rows: the same bytes for the same rows, whole files only, and never over other rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from etude.data.prepare.base import DataSplit, Preparation, Row, SkippedRows
from etude.errors import ConfigError
from etude.observe import progress


@dataclass(frozen=True)
class PreparedFiles:
    """The result of a preparation."""

    files: Mapping[DataSplit, Path]
    """The files with rows, by split."""
    counts: Mapping[DataSplit, int]
    skipped: SkippedRows
    example: Row
    """The first row of the first file."""
    command: str
    """The command that uses the files."""


def prepare_dataset(preparation: Preparation) -> PreparedFiles:
    """Read or draw the rows of a preparation, and write them."""
    directory = (preparation.directory or Path("data", preparation.title)).expanduser()
    _check_directory(directory)
    skipped = SkippedRows()
    splits = {split: rows for split, rows in preparation.make_rows(skipped).items() if rows}
    files = {split: directory / f"{split}.parquet" for split in splits}
    contents: dict[Path, bytes] = {}
    with progress(f"writing {preparation.title}") as bar:
        for split, rows in splits.items():
            table, sink = pa.Table.from_pylist(rows, preparation.arrow_schema()), pa.BufferOutputStream()
            pq.write_table(table, sink, compression="zstd")
            contents[files[split]] = sink.getvalue().to_pybytes()
            bar.advance(len(rows))
    _write_files(contents)
    counts = {split: len(rows) for split, rows in splits.items()}
    example = next(iter(splits.values()))[0]
    return PreparedFiles(files, counts, skipped, example, preparation.command(files))


def _check_directory(directory: Path) -> None:
    """Refuse a path that cannot be a directory, before any data is read."""
    for path in (directory, *directory.parents):
        if path.exists():
            if not path.is_dir():
                raise ConfigError(f"`directory` is {directory}, and {path} is a file. Give another `directory`.")
            return


def _write_files(contents: Mapping[Path, bytes]) -> None:
    """Write whole files, unless a file of one of these names holds other rows."""
    conflicts = [str(file) for file, content in contents.items() if file.exists() and file.read_bytes() != content]
    if conflicts:
        raise ConfigError(
            f"{' and '.join(conflicts)} {'is' if len(conflicts) == 1 else 'are'} there already, with other rows in it. "
            f"Give another `directory`, or move the old files away."
        )
    drafts = {file: file.with_name(f".{file.name}.draft") for file in contents}
    try:
        for file, draft in drafts.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(contents[file])
        for file, draft in drafts.items():  # once all are whole
            draft.replace(file)
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
