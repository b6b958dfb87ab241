"""The splits of a dataset on the Hugging Face hub, and the files of each.

A name is `owner/name`, `owner/name:split`, or `owner/name/config:split`. The card (the README.md) of most datasets
lists the files of each split. If it lists none, a file belongs to the split that its path names. The file's own name
counts before that of a directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from etude.data.files import READERS
from etude.errors import ConfigError

NAMED = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:/([\w.-]+))?(?::([\w.-]+))?")
WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval"), "test"),
}
"""The words in a path that name a split."""
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..+)")
NO_ROWS = ("dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""Files beside the data that describe it."""
NO_DATA = (".*", "*/.*", *NO_ROWS, *(f"*/{name}" for name in NO_ROWS))
"""Patterns of files that hold no data, with any suffix."""
FILE_SUFFIXES = (*READERS, ".gz", ".py", ".txt", ".arrow")
"""Suffixes of names that are files, even if they do not exist."""


@dataclass(frozen=True)
class DatasetName:
    """The name of a dataset in a run's options."""

    text: str
    """The whole name, as it was written."""
    name: str
    """The repository."""
    config: str | None
    """One of several tables in it."""
    split: str | None
    """A split of that table."""


@dataclass(frozen=True)
class SplitPatterns:
    """The files of a split: the patterns that the card lists, or none where the paths of the files decide."""

    listed: tuple[str, ...] | None
    directory: str = ""
    """The directory of the table, if the card names only that."""

    @property
    def downloaded(self) -> tuple[str, ...]:
        """The patterns of the files that are downloaded: all data, if the card lists none."""
        if self.listed is not None:
            return self.listed
        return tuple(f"{self.directory}/*{suffix}" if self.directory else f"*{suffix}" for suffix in READERS)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The patterns of files that hold no data, unless the card lists them."""
        return () if self.listed is not None else NO_DATA

    def files(self, dataset: DatasetName, snapshot: Path, option: str) -> list[Path]:
        """Return the files of the split in a snapshot; refuse a split without files, or with unreadable ones."""
        files = self.matching(snapshot)
        if self.listed is None:
            root, splits = snapshot / self.directory, dict[str, list[Path]]()
            for file in files:
                path = file.relative_to(root)
                if self.directory or dataset.config in (None, path.parts[0]):
                    splits.setdefault(_split_of(path), []).append(file)
            files = splits[_chosen(dataset, sorted(splits), option)] if splits else []
        odd = next((file for file in files if not file.name.endswith(tuple(READERS))), None)
        if not files or odd is not None:
            what = "has no data files" if odd is None else f"keeps its data in files such as {odd.name}"
            raise ConfigError(
                f"{quote_option(option, dataset.text)} names a data set of the Hugging Face hub that {what}; what can "
                f"be read are {', '.join(READERS)}. Write it as such a file with the `datasets` library, and give that."
            )
        return files

    def matching(self, snapshot: Path) -> list[Path]:
        """Return the files of a snapshot that match."""
        files = sorted(file for file in snapshot.rglob("*") if file.is_file())
        paths = [(file, file.relative_to(snapshot).as_posix()) for file in files]
        return [file for file, path in paths if _fits(path, self.downloaded) and not _fits(path, self.ignored)]


def quote_option(option: str, text: str) -> str:
    """Return the name for an error message: with the option that holds it, if any."""
    return f"`{option}=[{text}]`" if option else f"`{text}`"


def parse_dataset_name(text: str) -> DatasetName | None:
    """Parse a dataset's name on the hub; return None for a file, a directory, or a Python function."""
    named = NAMED.fullmatch(text)
    if named is None or Path(text).exists() or Path(text.partition(":")[0]).suffix in FILE_SUFFIXES:
        return None
    return DatasetName(text, *named.groups())


def patterns_of(dataset: DatasetName, card: Path, option: str) -> SplitPatterns:
    """Return the file patterns of the requested split, as far as the card lists them."""
    configs = _configs(card)
    if not configs:
        return SplitPatterns(None)
    names = [str(table.get("config_name", "default")) for table in configs]
    preset = [name for table, name in zip(configs, names, strict=True) if table.get("default") or name == "default"]
    name = dataset.config or (names[0] if len(names) == 1 else preset[0] if preset else None)
    if name not in names:
        listed = ", ".join(f"`{dataset.name}/{table}`" for table in names)
        problem = f"has no `{dataset.config}`" if dataset.config else "holds several tables"
        raise ConfigError(f"{quote_option(option, dataset.text)}: the data set {problem}. Name one of them: {listed}.")
    config = configs[names.index(name)]
    try:
        below = _text(config.get("data_dir") or "").strip("./")
        splits = _patterns_by_split(config.get("data_files"), below)
    except _MalformedError as odd:
        raise ConfigError(
            f"{quote_option(option, dataset.text)}: the data set's card, {card}, says where its files are in a way "
            f"that cannot be read: {odd} is under `{name}`. Give the files themselves, by their paths."
        ) from None
    if not splits:
        return SplitPatterns(None, below)
    return SplitPatterns(splits[_chosen(dataset, list(splits), option)])


def lacking_shards(dataset: DatasetName, patterns: SplitPatterns, snapshot: Path) -> str:
    """Return the first file that is known to belong to the split and is not in the snapshot; empty if none is known."""
    present = {file.relative_to(snapshot).as_posix() for file in patterns.matching(snapshot)}
    if not present:
        return f"files of `{dataset.split}`" if dataset.split else "data files"
    for path in sorted(present):
        if shard := SHARD.fullmatch(path):
            stem, _, count, suffix = shard.groups()
            names = (f"{stem}-{number:05d}-of-{count}{suffix}" for number in range(int(count)))
            if missing := next((shard_name for shard_name in names if shard_name not in present), None):
                return missing
    return ""


def _configs(card: Path) -> list[dict[str, Any]]:
    """Return the tables that a card lists."""
    if not card.is_file():
        return []
    text = card.read_text(encoding="utf-8", errors="replace")
    head = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    try:
        header = yaml.safe_load(head.group(1)) if head else None
    except yaml.YAMLError:
        return []
    configs = header.get("configs") if isinstance(header, dict) else None
    return [entry for entry in configs if isinstance(entry, dict)] if isinstance(configs, list) else []


def _patterns_by_split(data_files: Any, directory: str) -> dict[str, tuple[str, ...]]:
    """Return the patterns of each split, from any of the formats that a card may use."""
    if data_files is None:
        return {}
    if isinstance(data_files, Mapping):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    splits: dict[str, tuple[str, ...]] = {}
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        item = entry if isinstance(entry, Mapping) else {"path": entry}
        split, path = _text(item.get("split", "train")), item.get("path")
        joined = tuple(f"{directory}/{pattern}" if directory else pattern for pattern in map(_text, _several(path)))
        splits[split] = splits.get(split, ()) + joined
    return splits


class _MalformedError(Exception):
    """An entry in a card that is in none of the formats in which files are listed."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _MalformedError(f"`{value!r}`")
    return value


def _several(path: Any) -> list[Any]:
    return path if isinstance(path, list) else [path]


def _fits(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def _chosen(dataset: DatasetName, splits: Sequence[str], option: str) -> str:
    """Return the requested split: the one that is named, or the only one, or `train` to train on."""
    if dataset.split is not None:
        if dataset.split in splits:
            return dataset.split
        problem = f"has no `{dataset.split}`"
    elif len(splits) == 1:
        return splits[0]
    elif option != "data.val" and "train" in splits:
        return "train"
    else:
        problem = "has several parts"
    name = dataset.text.partition(":")[0]
    raise ConfigError(
        f"{quote_option(option, dataset.text)}: the data set {problem}. Name one: "
        f"{', '.join(f'`{name}:{split}`' for split in splits)}."
    )


def _split_of(path: Path) -> str:
    """Return the split that a file's path names; `train` if it names none."""
    words = (word for part in reversed(path.parts) for word in re.split(r"[^a-z]+", part.lower()))
    return next((WORDS[word] for word in words if word in WORDS), "train")
