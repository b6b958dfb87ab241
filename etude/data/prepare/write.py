"""The writer of prepared rows: the same bytes for the same rows, whole files only, and never over other rows."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

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


def prepare_dataset(preparation: Preparation, console: Console | None = None) -> PreparedFiles:
    """Read or draw the rows of a preparation, and write them."""
    directory = (preparation.directory or Path("data", preparation.title)).expanduser()
    _check_directory(directory)
    skipped = SkippedRows()
    splits = {split: rows for split, rows in preparation.make_rows(skipped, console).items() if rows}
    with progress(f"writing {preparation.title}", None, console) as bar:
        drafts: dict[DataSplit, Path] = {}
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for split, rows in splits.items():
                drafts[split] = directory / f".{split}.parquet.draft"
                _write(rows, preparation.arrow_schema(), drafts[split])
                bar.advance(len(rows))
            files = _rename_drafts(drafts)
        finally:
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
    first = next(iter(splits))
    return PreparedFiles(
        files,
        {split: len(rows) for split, rows in splits.items()},
        skipped,
        splits[first][0],
        preparation.command(files),
    )


def _check_directory(directory: Path) -> None:
    """Refuse a path that cannot be a directory, before any data is read."""
    for path in (directory, *directory.parents):
        if path.exists():
            if not path.is_dir():
                raise ConfigError(f"`directory` is {directory}, and {path} is a file. Give another `directory`.")
            return


def _write(rows: Sequence[Row], schema: pa.Schema, path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema), path, compression="zstd")


def _rename_drafts(drafts: Mapping[DataSplit, Path]) -> dict[DataSplit, Path]:
    """Rename the drafts to their final names, unless a file of that name holds other rows."""
    files = {split: draft.with_name(f"{split}.parquet") for split, draft in drafts.items()}
    conflicts = [
        str(file)
        for split, file in files.items()
        if file.exists() and not filecmp.cmp(file, drafts[split], shallow=False)
    ]
    if conflicts:
        raise ConfigError(
            f"{' and '.join(conflicts)} {'is' if len(conflicts) == 1 else 'are'} there already, with other rows in it. "
            f"Give another `directory`, or move the old files away."
        )
    for split, file in files.items():
        drafts[split].replace(file)
    return files
