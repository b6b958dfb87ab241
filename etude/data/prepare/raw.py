"""Raw files: their search, their splits and their rows. Rows that cannot be used are left out with the reason."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from etude.data.files import READERS, RowSource, read_rows
from etude.data.prepare.base import SPLITS, DataSplit, Preparation, Row, SkippedRows, sample_keys
from etude.errors import ConfigError, DataError
from etude.observe import progress

SPLIT_NAMES: dict[str, DataSplit] = {
    "train": "train",
    "validation": "val",
    "valid": "val",
    "val": "val",
    "dev": "val",
    "test": "test",
}
"""The words in a path that name a split."""
NOT_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
SAVED_MARKER = "state.json"
"""The file that marks a directory of `save_to_disk`."""


class RawFilePreparation(Preparation):
    """A preparation of published files."""

    raw: tuple[Path, ...] = Field((), description="published files or folders of them; their names give the splits")
    held_out: float = Field(
        0.0, ge=0, lt=1, description="share of the training questions that goes to val.parquet; larger trains on fewer"
    )
    limit: int | None = Field(None, ge=1, description="most rows of each split, chosen at random; null is all")

    @field_validator("raw", mode="before")
    @classmethod
    def _wrap_single_value(cls, files: Any) -> Any:
        """Accept one path without brackets."""
        return (files,) if isinstance(files, str) else files

    @abstractmethod
    def convert_row(self, values: Mapping[str, Any], where: str) -> Row | str:
        """Convert a raw row, or return the reason to leave it out, which completes a sentence after "left out:"."""

    def duplicate_key(self, row: Row) -> str:
        """Return a key that is equal only for duplicate rows, of which one is enough."""
        return self.question_key(row)

    def question_key(self, row: Row) -> str:
        """Return a key of the question. Rows with equal keys must all be for training, or all for evaluation."""
        return json.dumps(row["prompt"])

    def make_rows(self, skipped: SkippedRows) -> dict[DataSplit, list[Row]]:
        """Read the evaluation splits first, so that their questions are left out of training."""
        files, sources = self._files(), list[tuple[DataSplit, RowSource]]()
        with progress(f"opening {self.title}", len(files)) as bar:
            for split, path in files:
                sources.append((split, read_rows(path)))
                bar.advance()
        rows_by_split: dict[DataSplit, list[Row]] = {split: [] for split in SPLITS}
        split_of, seen = dict[str, DataSplit](), set[str]()
        with progress(f"reading {self.title}", sum(len(rows) for _, rows in sources)) as bar:
            for split in reversed(SPLITS):
                located_rows = (
                    (rows, row_index) for name, rows in sources if name == split for row_index in range(len(rows))
                )
                for index, (rows, row_index) in enumerate(located_rows):
                    where = f"{rows.name}, row {row_index}"
                    row = self.convert_row(rows.row(row_index), where)
                    reason = row if isinstance(row, str) else self._find_duplicate(row, split, split_of, seen)
                    if isinstance(row, str) or reason:
                        skipped.add(reason, where)
                    else:
                        row["extra_info"] |= {"split": split, "index": index}
                        rows_by_split[split].append(row)
                    bar.advance()
        if not any(rows_by_split.values()):
            raise DataError(
                f"Nothing in {', '.join(map(str, self.raw))} makes a row of {self.title}. "
                f"{'; '.join(skipped.lines()) or 'Its files are empty'}. Give the files as they were published."
            )
        return self._apply_limit(self._hold_out(rows_by_split))

    def _find_duplicate(self, row: Row, split: DataSplit, split_of: dict[str, DataSplit], seen: set[str]) -> str:
        """Return the reason to leave a duplicate row out; empty for a new row.

        A row is kept once. A question is kept in one split.

        split_of: the splits of the questions so far. seen: the keys of the rows so far.
        """
        key, other = self.duplicate_key(row), split_of.setdefault(self.question_key(row), split)
        if other != split:
            return f"its question is among the {other} rows too"
        if key in seen:
            return "the same row came before"
        seen.add(key)
        return ""

    def _files(self) -> list[tuple[DataSplit, Path]]:
        if not self.raw:
            raise ConfigError(
                f"{self.title} is made from its published files, and `raw` names none. Download them first, "
                f"`hf download {self.published_name} --repo-type dataset --local-dir raw/{self.title}`, then set "
                f"`raw=raw/{self.title}`."
            )
        return list(find_raw_files(self.raw))

    def _hold_out(self, rows_by_split: dict[DataSplit, list[Row]]) -> dict[DataSplit, list[Row]]:
        """Move a share of the training questions to the validation split, each with all its rows."""
        if not self.held_out:
            return rows_by_split
        if rows_by_split["val"]:
            raise ConfigError(
                f"`held_out={self.held_out}` takes validation rows from the training rows, and the raw files have "
                f"{len(rows_by_split['val'])} validation rows already. Leave `held_out` out."
            )
        questions = [self.question_key(row) for row in rows_by_split["train"]]
        distinct = list(dict.fromkeys(questions))
        held_out = sample_keys(distinct, round(self.held_out * len(distinct)), f"{self.seed} held out")
        parts: dict[DataSplit, list[Row]] = {"train": [], "val": []}
        for row, question in zip(rows_by_split["train"], questions, strict=True):
            split: DataSplit = "val" if question in held_out else "train"
            row["extra_info"]["split"] = split
            parts[split].append(row)
        if not parts["train"] or not parts["val"]:
            raise ConfigError(
                f"`held_out={self.held_out}` of {len(distinct)} questions leaves {len(parts['train'])} rows to train "
                f"on and {len(parts['val'])} to score on. Choose another share, or 0."
            )
        return rows_by_split | parts

    def _apply_limit(self, rows_by_split: dict[DataSplit, list[Row]]) -> dict[DataSplit, list[Row]]:
        if self.limit is None:
            return rows_by_split
        limited = {}
        for split, rows in rows_by_split.items():
            kept_keys = sample_keys([self.duplicate_key(row) for row in rows], self.limit, f"{self.seed} limit")
            limited[split] = [row for row in rows if self.duplicate_key(row) in kept_keys]
        return limited


def find_raw_files(raw: Sequence[Path]) -> Iterator[tuple[DataSplit, Path]]:
    """Yield every data file in these paths, with the split that its path names, or the training split.

    Hidden files and metadata files are skipped. The files of a folder come in the order of their names, with numbers
    sorted as numbers.
    """
    for root in (path.expanduser() for path in raw):
        if not root.exists():
            raise ConfigError(f"`raw` names {root}, and there is no such file or folder (in {Path.cwd()}).")
        files = sorted(_list_files(root), key=_natural_key)
        if not files:
            raise ConfigError(
                f"`raw` names {root}, and nothing in it can be read. Give files that end in "
                f"{', '.join(READERS)}, or directories written by `save_to_disk`."
            )
        yield from ((_split_of(path, root), path) for path in files)


def _list_files(root: Path) -> Iterator[Path]:
    if root.is_file() or (root / SAVED_MARKER).exists():
        yield root
        return
    for path in root.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _list_files(path)
        elif path.name not in NOT_DATA and path.name.endswith(tuple(READERS)):
            yield path


def _natural_key(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts `2.json` before `10.json`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", str(path))]


def _split_of(path: Path, root: Path) -> DataSplit:
    """Return the split that the last matching part of a path names: `train-00000-of-00001.parquet`, `test/a/1.json`."""
    for part in reversed(path.relative_to(root).parts or (root.name,)):
        splits = [SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", part.lower()) if word in SPLIT_NAMES]
        if splits:
            return splits[0]
    return SPLIT_NAMES.get(root.name.lower(), "train")


def require_text(values: Mapping[str, Any], column: str, where: str) -> str:
    """Return the text in a column, without spaces around it."""
    value = values.get(column)
    if not isinstance(value, str):
        actual = (
            f"a value of type {type(value).__name__} in it"
            if value is not None
            else "none"
            if column in values
            else "no such column"
        )
        raise DataError(
            f"{where} should have text in the column `{column}`, and it has {actual}; its columns are "
            f"{', '.join(values)}. Give the published files, and no others with them."
        )
    return value.strip()
