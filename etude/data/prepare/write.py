"""Rows become files: the same bytes for the same rows, whole or not there, and never over a file that holds others."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from etude.data.prepare.base import LeftOut, Preparation, Row, Split
from etude.errors import ConfigError
from etude.observe import progress

__all__ = ["Prepared", "prepared"]


@dataclass(frozen=True)
class Prepared:
    """What came of a preparation."""

    files: Mapping[Split, Path]
    """The files that hold rows, by what they are for."""
    counts: Mapping[Split, int]
    left_out: LeftOut
    example: Row
    """The first row of the first file."""
    command: str
    """What to type next."""


def prepared(asked: Preparation, console: Console | None = None) -> Prepared:
    """Prepare what is asked for: read or make its rows, and write them."""
    directory = (asked.directory or Path("data", asked.title)).expanduser()
    _refuse_a_file(directory)
    left_out = LeftOut()
    splits = {split: rows for split, rows in asked.rows(left_out, console).items() if rows}
    with progress(f"writing {asked.title}", None, console) as bar:
        drafts: dict[Split, Path] = {}
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for split, rows in splits.items():
                drafts[split] = directory / f".{split}.parquet.draft"
                _write(rows, asked.layout(), drafts[split])
                bar.advance(len(rows))
            files = _put_in_place(drafts)
        finally:
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
    first = next(iter(splits))
    return Prepared(
        files,
        {split: len(rows) for split, rows in splits.items()},
        left_out,
        splits[first][0],
        asked.command(files),
    )


def _refuse_a_file(directory: Path) -> None:
    """What cannot be a directory is told before anything is read."""
    for place in (directory, *directory.parents):
        if place.exists():
            if not place.is_dir():
                raise ConfigError(f"`directory` is {directory}, and {place} is a file. Give another `directory`.")
            return


def _write(rows: Sequence[Row], schema: pa.Schema, path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema), path, compression="zstd")


def _put_in_place(drafts: Mapping[Split, Path]) -> dict[Split, Path]:
    """Give the drafts their names, unless a file of that name holds something else."""
    files = {split: draft.with_name(f"{split}.parquet") for split, draft in drafts.items()}
    others = [
        str(file)
        for split, file in files.items()
        if file.exists() and not filecmp.cmp(file, drafts[split], shallow=False)
    ]
    if others:
        raise ConfigError(
            f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'} there already, with other rows in it. Give "
            f"another `directory`, or move what is there away."
        )
    for split, file in files.items():
        drafts[split].replace(file)
    return files
