"""Rows become files: the same bytes for the same rows, whole or not there, and never over a file that holds others."""

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

__all__ = ["PreparedFiles", "prepare_dataset"]


@dataclass(frozen=True)
class PreparedFiles:
    """What came of a preparation."""

    files: Mapping[DataSplit, Path]
    """The files that hold rows, by what they are for."""
    counts: Mapping[DataSplit, int]
    skipped: SkippedRows
    example: Row
    """The first row of the first file."""
    command: str
    """What to type next."""


def prepare_dataset(preparation: Preparation, console: Console | None = None) -> PreparedFiles:
    """Prepare what is asked for: read or make its rows, and write them."""
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
    """What cannot be a directory is told before anything is read."""
    for path in (directory, *directory.parents):
        if path.exists():
            if not path.is_dir():
                raise ConfigError(f"`directory` is {directory}, and {path} is a file. Give another `directory`.")
            return


def _write(rows: Sequence[Row], schema: pa.Schema, path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema), path, compression="zstd")


def _rename_drafts(drafts: Mapping[DataSplit, Path]) -> dict[DataSplit, Path]:
    """Give the drafts their names, unless a file of that name holds something else."""
    files = {split: draft.with_name(f"{split}.parquet") for split, draft in drafts.items()}
    conflicts = [
        str(file)
        for split, file in files.items()
        if file.exists() and not filecmp.cmp(file, drafts[split], shallow=False)
    ]
    if conflicts:
        raise ConfigError(
            f"{' and '.join(conflicts)} {'is' if len(conflicts) == 1 else 'are'} there already, with other rows in it. "
            f"Give another `directory`, or move what is there away."
        )
    for split, file in files.items():
        drafts[split].replace(file)
    return files
