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

from etude.data.files import READERS, Rows, read
from etude.data.prepare.base import SPLITS, LeftOut, Preparation, Row, Split, drawn
from etude.errors import ConfigError, DataError
from etude.observe import progress

__all__ = ["FromFiles", "raw_files", "text_of"]

NAMES: dict[str, Split] = {
    "train": "train",
    "validation": "val",
    "valid": "val",
    "val": "val",
    "dev": "val",
    "test": "test",
}
"""The words in a path that tell a split."""
NOT_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
SAVED = "state.json"
"""What a directory has that `save_to_disk` wrote."""


class FromFiles(Preparation):
    """A preparation from files as they were published."""

    raw: tuple[Path, ...] = Field((), description="the published files, or folders of them; splits go by their names")
    held_out: float = Field(
        0.0, ge=0, lt=1, description="the share of what would be trained on that is kept apart, as val.parquet"
    )
    limit: int | None = Field(None, ge=1, description="at most so many rows of each split, by chance; null is all")

    @field_validator("raw", mode="before")
    @classmethod
    def _one_is_a_list(cls, files: Any) -> Any:
        """One place may stand without brackets."""
        return (files,) if isinstance(files, str) else files

    @abstractmethod
    def row(self, values: Mapping[str, Any], where: str) -> Row | str:
        """The row that a raw one makes; or, in words that go on after "left out:", why it makes none."""

    def identity(self, row: Row) -> str:
        """What is the same only for rows of which one is enough."""
        return self.question(row)

    def question(self, row: Row) -> str:
        """What is the same for rows of which none may be trained on where another is scored on."""
        return json.dumps(row["prompt"])

    def rows(self, left_out: LeftOut, console: Console | None) -> dict[Split, list[Row]]:
        """What is scored on is read first, so that what stands on both sides is kept from training."""
        files, opened = self._files(), list[tuple[Split, Rows]]()
        with progress(f"opening {self.title}", len(files), console) as bar:
            for split, path in files:
                opened.append((split, read(path)))
                bar.advance()
        found: dict[Split, list[Row]] = {split: [] for split in SPLITS}
        once = _Once()
        with progress(f"reading {self.title}", sum(len(rows) for _, rows in opened), console) as bar:
            for split in reversed(SPLITS):
                places = ((rows, place) for name, rows in opened if name == split for place in range(len(rows)))
                for index, (rows, place) in enumerate(places):
                    where = f"{rows.name}, row {place}"
                    row = self.row(rows.row(place), where)
                    why = row if isinstance(row, str) else once.why_not(self.question(row), self.identity(row), split)
                    if isinstance(row, str) or why:
                        left_out.add(why, where)
                    else:
                        row["extra_info"] |= {"split": split, "index": index}
                        found[split].append(row)
                    bar.advance()
        if not any(found.values()):
            raise DataError(
                f"Nothing in {', '.join(map(str, self.raw))} makes a row of {self.title}. "
                f"{'; '.join(left_out.lines()) or 'Its files are empty'}. Give the files as they were published."
            )
        return self._limited(self._held_out(found))

    def _files(self) -> list[tuple[Split, Path]]:
        if not self.raw:
            raise ConfigError(
                f"{self.title} is made of its files as they were published, and `raw` names none. Fetch them first, "
                f"`hf download {self.published} --repo-type dataset --local-dir raw/{self.title}`, then say "
                f"`raw=raw/{self.title}`."
            )
        return list(raw_files(self.raw))

    def _held_out(self, found: dict[Split, list[Row]]) -> dict[Split, list[Row]]:
        """Some of what would be trained on becomes what is scored on meanwhile; a question is on one side only."""
        if not self.held_out:
            return found
        if found["val"]:
            raise ConfigError(
                f"`held_out={self.held_out}` keeps rows apart to score on, and the raw files have {len(found['val'])} "
                f"such rows of their own. Leave `held_out` out."
            )
        questions = [self.question(row) for row in found["train"]]
        asked = list(dict.fromkeys(questions))
        apart = drawn(asked, round(self.held_out * len(asked)), f"{self.seed} held out")
        parts: dict[Split, list[Row]] = {"train": [], "val": []}
        for row, question in zip(found["train"], questions, strict=True):
            split: Split = "val" if question in apart else "train"
            row["extra_info"]["split"] = split
            parts[split].append(row)
        if not parts["train"] or not parts["val"]:
            raise ConfigError(
                f"`held_out={self.held_out}` of {len(asked)} questions leaves {len(parts['train'])} rows to train on "
                f"and {len(parts['val'])} to score on. Choose another share, or 0."
            )
        return found | parts

    def _limited(self, found: dict[Split, list[Row]]) -> dict[Split, list[Row]]:
        if self.limit is None:
            return found
        limited = {}
        for split, rows in found.items():
            kept = drawn([self.identity(row) for row in rows], self.limit, f"{self.seed} limit")
            limited[split] = [row for row in rows if self.identity(row) in kept]
        return limited


class _Once:
    """What was read before: a row comes once, and a question on one side only."""

    def __init__(self) -> None:
        self._asked: dict[str, Split] = {}
        self._rows: set[str] = set()

    def why_not(self, question: str, identity: str, split: Split) -> str:
        """Why a row is one too many; empty where it is not."""
        other = self._asked.setdefault(question, split)
        if other != split:
            return f"its question is among the {other} rows too"
        if identity in self._rows:
            return "the same stands there before"
        self._rows.add(identity)
        return ""


def raw_files(raw: Sequence[Path]) -> Iterator[tuple[Split, Path]]:
    """Every file of data in these places, with the split that its path tells: the training split where it tells none.

    What is hidden is passed over, and what describes data without holding any. The files of a folder come in the order
    of their names, numbers counted as numbers.
    """
    for place in (each.expanduser() for each in raw):
        if not place.exists():
            raise ConfigError(f"`raw` names {place}, and there is no such file or folder (in {Path.cwd()}).")
        found = sorted(_within(place), key=_in_order)
        if not found:
            raise ConfigError(
                f"`raw` names {place}, and nothing in it can be read. What can: files that end in "
                f"{', '.join(READERS)}, and directories written by `save_to_disk`."
            )
        yield from ((_split(path, place), path) for path in found)


def _within(place: Path) -> Iterator[Path]:
    if place.is_file() or (place / SAVED).exists():
        yield place
        return
    for path in place.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _within(path)
        elif path.name not in NOT_DATA and path.name.endswith(tuple(READERS)):
            yield path


def _in_order(path: Path) -> list[tuple[int, str]]:
    """A key by which `2.json` stands before `10.json`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", str(path))]


def _split(path: Path, place: Path) -> Split:
    """What the last part of a path tells that names a split: `train-00000-of-00001.parquet`, `test/algebra/1.json`."""
    for part in reversed(path.relative_to(place).parts or (place.name,)):
        told = [NAMES[word] for word in re.split(r"[^a-z]+", part.lower()) if word in NAMES]
        if told:
            return told[0]
    return NAMES.get(place.name.lower(), "train")


def text_of(values: Mapping[str, Any], column: str, where: str) -> str:
    """The text in a column, spaces around it aside."""
    found = values.get(column)
    if not isinstance(found, str):
        have = (
            f"a value of type {type(found).__name__} in it"
            if found is not None
            else "none"
            if column in values
            else "no such column"
        )
        raise DataError(
            f"{where} should have text in the column `{column}`, and it has {have}; its columns are "
            f"{', '.join(values)}. Give the files as they were published, and no others with them."
        )
    return found.strip()
