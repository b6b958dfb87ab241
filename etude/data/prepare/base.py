"""What every preparation is: an object that holds its own options and makes the rows of a run's files.

Rows that ask for an answer have verl's columns, so that both trainers read them: `data_source`, `prompt`, `ability`,
`reward_model` with its `ground_truth`, and `extra_info` with the split and the place that a row was found at.
"""

from __future__ import annotations

import random
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import pyarrow as pa
from pydantic import Field, model_validator
from rich.console import Console

from etude.config import Config
from etude.errors import ConfigError
from etude.observe import progress

__all__ = [
    "MESSAGES_TYPE",
    "SPLITS",
    "DataSplit",
    "Preparation",
    "PromptPreparation",
    "RandomInt",
    "Row",
    "SkippedRows",
    "SyntheticPreparation",
    "options_of",
    "sample_keys",
]

Row: TypeAlias = dict[str, Any]
RandomInt: TypeAlias = Callable[[int, int], int]
"""`draw(a, b)` is a whole number from a to b, both included."""
DataSplit: TypeAlias = Literal["train", "val", "test"]
SPLITS: tuple[DataSplit, ...] = ("train", "val", "test")
MESSAGES_TYPE = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
MAX_DUPLICATES = 10_000
"""Problems drawn in a row without a new one, after which there are taken to be no more."""


@dataclass
class SkippedRows:
    """What was left out."""

    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)
    """How often for each reason, and where first. A reason goes on after "left out:"."""

    def add(self, reason: str, where: str) -> None:
        """One more."""
        count, first = self.reasons.get(reason, (0, where))
        self.reasons[reason] = (count + 1, first)

    def lines(self) -> list[str]:
        """A line for each reason."""
        return [f"{count:,} left out: {reason} (first: {first})" for reason, (count, first) in self.reasons.items()]


class Preparation(Config, ABC):
    """How one data set becomes files that a run reads."""

    directory: Path | None = Field(None, description="where the files are written; null is data/ and the set's name")
    source: str | None = Field(
        None, description="the `data_source` of its rows; scores are told apart by it. Null is its published name"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="what every choice by chance is derived from")

    title: ClassVar[str]
    """The name that it is asked for by."""
    published_name: ClassVar[str]
    """The name that verl's rewards know its source by."""
    extra_info_fields: ClassVar[Mapping[str, pa.DataType]] = {}
    """What `extra_info` holds beside split and place."""

    @abstractmethod
    def make_rows(self, skipped: SkippedRows, console: Console | None) -> dict[DataSplit, list[Row]]:
        """The rows of each split, in their order."""

    @abstractmethod
    def columns(self) -> Mapping[str, pa.DataType]:
        """The columns of its files between `data_source` and `extra_info`."""

    @abstractmethod
    def command(self, files: Mapping[DataSplit, Path]) -> str:
        """What to type next, with these files."""

    def arrow_schema(self) -> pa.Schema:
        """The columns of its files."""
        extra_info = pa.struct([("split", pa.string()), ("index", pa.int64()), *self.extra_info_fields.items()])
        return pa.schema([("data_source", pa.string()), *self.columns().items(), ("extra_info", extra_info)])

    @property
    def data_source(self) -> str:
        """The `data_source` of its rows."""
        return self.published_name if self.source is None else self.source


class PromptPreparation(Preparation):
    """A preparation whose rows ask for one answer, in words that may be chosen."""

    prompt: str = Field(description="what is asked")
    system: str = Field("", description="what a system message says before it; empty is none")
    form: Literal["messages", "text"] = Field(
        "messages", description="`messages` for a model that chats, `text` for one that goes on with what it reads"
    )

    placeholders: ClassVar[tuple[str, ...]] = ("question",)
    """What `prompt` must name in braces."""
    ability: ClassVar[str] = "math"
    ground_truth_type: ClassVar[pa.DataType] = pa.string()
    """The type of its ground truths."""

    @model_validator(mode="after")
    def _check_prompt(self) -> PromptPreparation:
        missing = [f"{{{word}}}" for word in self.placeholders if f"{{{word}}}" not in self.prompt]
        if missing:
            raise ConfigError(
                f"`prompt` is {self.prompt!r}, without {' and '.join(missing)}: the model would not learn the problem. "
                f"Write it where the problem is to stand."
            )
        if self.system and self.form == "text":
            raise ConfigError(
                "`system` is a message before the prompt, and `form=text` makes no messages. Leave it out, or write "
                "its words into `prompt`."
            )
        return self

    @property
    @abstractmethod
    def reward(self) -> str:
        """The reward that judges answers to its tasks, as a run is told."""

    def make_row(self, ground_truth: Any, extra_info: Mapping[str, Any], **values: str) -> Row:
        """A row that asks about these words."""
        text = self.prompt
        for word, value in values.items():
            text = text.replace(f"{{{word}}}", value)
        system_messages = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "data_source": self.data_source,
            "prompt": text if self.form == "text" else [*system_messages, {"role": "user", "content": text}],
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": ground_truth},
            "extra_info": dict(extra_info),
        }

    def columns(self) -> dict[str, pa.DataType]:
        """The prompt, and the right answer."""
        return {
            "prompt": pa.string() if self.form == "text" else MESSAGES_TYPE,
            "ability": pa.string(),
            "reward_model": pa.struct([("style", pa.string()), ("ground_truth", self.ground_truth_type)]),
        }

    def command(self, files: Mapping[DataSplit, Path]) -> str:
        """Training on its tasks, or scoring where there is nothing else."""
        start = "etude train grpo model.path=MODEL" if "train" in files else "etude eval model.path=MODEL"
        return " ".join([start, *options_of(files), f"reward={self.reward}"])


class SyntheticPreparation(PromptPreparation):
    """A preparation whose problems are made up, each only once."""

    train: int = Field(10_000, ge=1, description="how many problems to train on")
    test: int = Field(500, ge=0, description="how many others to score on; the same ones whatever `train` is")

    def make_rows(self, skipped: SkippedRows, console: Console | None) -> dict[DataSplit, list[Row]]:  # noqa: ARG002
        """Those to score on are drawn first, and none of them is drawn again."""
        seen: set[Hashable] = set()
        rows_by_split: dict[DataSplit, list[Row]] = {"train": [], "test": []}
        counts: dict[DataSplit, int] = {"test": self.test, "train": self.train}
        with progress(f"making {self.title}", self.test + self.train, console) as bar:
            for split, count in counts.items():
                problems = self._new_problems(random.Random(f"{self.title} {split} {self.seed}").random, seen)
                for index in range(count):
                    row = next(problems, None)
                    if row is None:
                        raise ConfigError(
                            f"{self.title} was asked for {self.train} and {self.test} problems, and with these options "
                            f"it found {len(seen)} that differ. Ask for fewer, or let them be more varied: `etude data "
                            f"prepare {self.title} --options` shows by what."
                        )
                    row["extra_info"] |= {"split": split, "index": index}
                    rows_by_split[split].append(row)
                    bar.advance()
        return rows_by_split

    def _new_problems(self, uniform: Callable[[], float], seen: set[Hashable]) -> Iterator[Row]:
        """Problems that were not drawn before, until there seem to be no more."""

        def draw(low: int, high: int) -> int:
            # Of all that `random` offers, this alone is promised to stay as it is.
            return low + int(uniform() * (high - low + 1))

        num_duplicates = 0
        while num_duplicates < MAX_DUPLICATES:
            key, row = self.make_problem(draw)
            num_duplicates = num_duplicates + 1 if key in seen or row is None else 0
            if not num_duplicates:
                assert row is not None
                seen.add(key)
                yield row

    @abstractmethod
    def make_problem(self, draw: RandomInt) -> tuple[Hashable, Row | None]:
        """A problem by chance: what tells it from others, and its row; no row where what was drawn makes no problem."""


def options_of(files: Mapping[DataSplit, Path]) -> list[str]:
    """How a run is told of these files."""
    train, val = files.get("train"), files.get("val") or files.get("test")
    return [_shell_option(f"data.{name}", file) for name, file in (("train", train), ("val", val)) if file is not None]


def _shell_option(option: str, file: Path) -> str:
    """An option that lists a file, quoted for the shell and for the option's own grammar where the path needs it."""
    if re.fullmatch(r"[\w./~-]+", str(file)):
        return f"{option}=[{file}]"
    escaped = str(file).replace("\\", "\\\\").replace("'", "\\'")
    return shlex.quote(f"{option}=['{escaped}']")


def sample_keys(keys: Sequence[str], count: int, purpose: str) -> set[str]:
    """So many of these keys, by chance that depends on the keys and the purpose alone, with any version of anything."""
    return set(sorted(keys, key=lambda key: blake2b(f"{purpose} {key}".encode(), digest_size=16).digest())[:count])
