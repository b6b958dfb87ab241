"""Raw files: found, told apart by split, read row by row, and what cannot be used left out by its reason."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator
from rich.console import Console

from etude.data.files import READERS, RowSource, read_rows
from etude.data.prepare.base import SPLITS, DataSplit, Preparation, Row, SkippedRows, sample_keys
from etude.errors import ConfigError, DataError
from etude.observe import progress

__all__ = ["RawFilePreparation", "find_raw_files", "require_text"]

SPLIT_NAMES: dict[str, DataSplit] = {
    "train": "train",
    "validation": "val",
    "valid": "val",
    "val": "val",
    "dev": "val",
    "test": "test",
}
"""The words in a path that tell a split."""
NOT_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
SAVED_MARKER = "state.json"
"""What a directory has that `save_to_disk` wrote."""


class RawFilePreparation(Preparation):
    """A preparation from files as they were published."""

    raw: tuple[Path, ...] = Field((), description="the published files, or folders of them; splits go by their names")
    held_out: float = Field(
        0.0, ge=0, lt=1, description="the share of what would be trained on that is kept apart, as val.parquet"
    )
    limit: int | None = Field(None, ge=1, description="at most so many rows of each split, by chance; null is all")

    @field_validator("raw", mode="before")
    @classmethod
    def _wrap_single_value(cls, files: Any) -> Any:
        """One place may stand without brackets."""
        return (files,) if isinstance(files, str) else files

    @abstractmethod
    def convert_row(self, values: Mapping[str, Any], where: str) -> Row | str:
        """The row that a raw one makes; or, in words that go on after "left out:", why it makes none."""

    def duplicate_key(self, row: Row) -> str:
        """What is the same only for rows of which one is enough."""
        return self.question_key(row)

    def question_key(self, row: Row) -> str:
        """What is the same for rows of which none may be trained on where another is scored on."""
        return json.dumps(row["prompt"])

    def make_rows(self, skipped: SkippedRows, console: Console | None) -> dict[DataSplit, list[Row]]:
        """What is scored on is read first, so that what stands on both sides is kept from training."""
        files, sources = self._files(), list[tuple[DataSplit, RowSource]]()
        with progress(f"opening {self.title}", len(files), console) as bar:
            for split, path in files:
                sources.append((split, read_rows(path)))
                bar.advance()
        rows_by_split: dict[DataSplit, list[Row]] = {split: [] for split in SPLITS}
        deduplicator = _Deduplicator()
        with progress(f"reading {self.title}", sum(len(rows) for _, rows in sources), console) as bar:
            for split in reversed(SPLITS):
                located_rows = (
                    (rows, row_index) for name, rows in sources if name == split for row_index in range(len(rows))
                )
                for index, (rows, row_index) in enumerate(located_rows):
                    where = f"{rows.name}, row {row_index}"
                    row = self.convert_row(rows.row(row_index), where)
                    reason = (
                        row
                        if isinstance(row, str)
                        else deduplicator.skip_reason(self.question_key(row), self.duplicate_key(row), split)
                    )
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

    def _files(self) -> list[tuple[DataSplit, Path]]:
        if not self.raw:
            raise ConfigError(
                f"{self.title} is made of its files as they were published, and `raw` names none. Fetch them first, "
                f"`hf download {self.published_name} --repo-type dataset --local-dir raw/{self.title}`, then say "
                f"`raw=raw/{self.title}`."
            )
        return list(find_raw_files(self.raw))

    def _hold_out(self, rows_by_split: dict[DataSplit, list[Row]]) -> dict[DataSplit, list[Row]]:
        """Some of what would be trained on becomes what is scored on meanwhile; a question is on one side only."""
        if not self.held_out:
            return rows_by_split
        if rows_by_split["val"]:
            raise ConfigError(
                f"`held_out={self.held_out}` keeps rows apart to score on, and the raw files have "
                f"{len(rows_by_split['val'])} such rows of their own. Leave `held_out` out."
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


class _Deduplicator:
    """What was read before: a row comes once, and a question on one side only."""

    def __init__(self) -> None:
        self._question_splits: dict[str, DataSplit] = {}
        self._rows: set[str] = set()

    def skip_reason(self, question: str, identity: str, split: DataSplit) -> str:
        """Why a row is one too many; empty where it is not."""
        other = self._question_splits.setdefault(question, split)
        if other != split:
            return f"its question is among the {other} rows too"
        if identity in self._rows:
            return "the same stands there before"
        self._rows.add(identity)
        return ""


def find_raw_files(raw: Sequence[Path]) -> Iterator[tuple[DataSplit, Path]]:
    """Every file of data in these places, with the split that its path tells: the training split where it tells none.

    What is hidden is passed over, and what describes data without holding any. The files of a folder come in the order
    of their names, numbers counted as numbers.
    """
    for root in (path.expanduser() for path in raw):
        if not root.exists():
            raise ConfigError(f"`raw` names {root}, and there is no such file or folder (in {Path.cwd()}).")
        files = sorted(_list_files(root), key=_natural_key)
        if not files:
            raise ConfigError(
                f"`raw` names {root}, and nothing in it can be read. What can: files that end in "
                f"{', '.join(READERS)}, and directories written by `save_to_disk`."
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
    """A key by which `2.json` stands before `10.json`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", str(path))]


def _split_of(path: Path, root: Path) -> DataSplit:
    """What the last part of a path tells that names a split: `train-00000-of-00001.parquet`, `test/algebra/1.json`."""
    for part in reversed(path.relative_to(root).parts or (root.name,)):
        splits = [SPLIT_NAMES[word] for word in re.split(r"[^a-z]+", part.lower()) if word in SPLIT_NAMES]
        if splits:
            return splits[0]
    return SPLIT_NAMES.get(root.name.lower(), "train")


def require_text(values: Mapping[str, Any], column: str, where: str) -> str:
    """The text in a column, spaces around it aside."""
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
            f"{', '.join(values)}. Give the files as they were published, and no others with them."
        )
    return value.strip()
