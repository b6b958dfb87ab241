"""The base classes of preparations: a preparation holds its own options and creates the rows of a run's files.

Rows with a prompt have verl's columns, so that both trainers read them. These are `data_source`, `prompt`, `ability`,
`reward_model` with its `ground_truth`, and `extra_info` with the split of a row and its index there.
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

from etude.config import Config
from etude.errors import ConfigError
from etude.observe import progress

Row: TypeAlias = dict[str, Any]
RandomInt: TypeAlias = Callable[[int, int], int]
"""A function: `draw(a, b)` returns a random whole number from a to b, both included."""
DataSplit: TypeAlias = Literal["train", "val", "test"]
SPLITS: tuple[DataSplit, ...] = ("train", "val", "test")
MESSAGES_TYPE = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
MAX_DUPLICATES = 10_000
"""The draws in a row without a new problem after which no more problems are expected."""


@dataclass
class SkippedRows:
    """The rows that were left out."""

    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The count of each reason and the first row with it. A reason completes a sentence after "left out:"."""

    def add(self, reason: str, where: str) -> None:
        """Count one more row."""
        count, first = self.reasons.get(reason, (0, where))
        self.reasons[reason] = (count + 1, first)

    def lines(self) -> list[str]:
        """Return a line for each reason."""
        return [f"{count:,} left out: {reason} (first: {first})" for reason, (count, first) in self.reasons.items()]


class Preparation(Config, ABC):
    """The preparation of one data set as files that a run reads."""

    directory: Path | None = Field(None, description="directory of the files; null is data/ and the set's name")
    source: str | None = Field(
        None, description="`data_source` of the rows, by which scores are reported; null is the published name"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of every random choice")

    title: ClassVar[str]
    """The name on the command line."""
    published_name: ClassVar[str]
    """The name under which verl's rewards know the data source."""
    extra_info_fields: ClassVar[Mapping[str, pa.DataType]] = {}
    """The fields of `extra_info` besides split and index."""

    @abstractmethod
    def make_rows(self, skipped: SkippedRows) -> dict[DataSplit, list[Row]]:
        """Return the rows of each split, in order."""

    @abstractmethod
    def columns(self) -> Mapping[str, pa.DataType]:
        """Return the columns of the files between `data_source` and `extra_info`."""

    @abstractmethod
    def command(self, files: Mapping[DataSplit, Path]) -> str:
        """Return the command that uses these files."""

    def arrow_schema(self) -> pa.Schema:
        """Return the schema of the files."""
        extra_info = pa.struct([("split", pa.string()), ("index", pa.int64()), *self.extra_info_fields.items()])
        return pa.schema([("data_source", pa.string()), *self.columns().items(), ("extra_info", extra_info)])

    @property
    def data_source(self) -> str:
        """The `data_source` of the rows."""
        return self.published_name if self.source is None else self.source


class PromptPreparation(Preparation):
    """A preparation of rows with a prompt, whose text is an option."""

    prompt: str = Field(description="text of the prompt")
    system: str = Field("", description="text of a system message before the prompt; empty is none")
    form: Literal["messages", "text"] = Field(
        "messages", description="`messages` for a chat model, `text` for a base model that continues a text"
    )

    placeholders: ClassVar[tuple[str, ...]] = ("question",)
    """The names that `prompt` must contain in braces."""
    reward_name: ClassVar[str]
    ability: ClassVar[str] = "math"
    ground_truth_type: ClassVar[pa.DataType] = pa.string()
    """The type of its ground truths."""

    @model_validator(mode="after")
    def _check_prompt(self) -> PromptPreparation:
        missing = [f"{{{word}}}" for word in self.placeholders if f"{{{word}}}" not in self.prompt]
        if missing:
            raise ConfigError(
                f"`prompt` is {self.prompt!r}, without {' and '.join(missing)}: the model would not see the problem. "
                f"Write it in the place of the problem."
            )
        if self.system and self.form == "text":
            raise ConfigError(
                "`system` is a message before the prompt, and `form=text` makes no messages. Leave it out, or write "
                "its words into `prompt`."
            )
        return self

    @property
    def reward(self) -> str:
        """The name of the reward that judges the answers, for the run's command."""
        return self.reward_name

    def make_row(self, ground_truth: Any, extra_info: Mapping[str, Any], **values: str) -> Row:
        """Create a row, with these values in place of the prompt's placeholders."""
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
        return {
            "prompt": pa.string() if self.form == "text" else MESSAGES_TYPE,
            "ability": pa.string(),
            "reward_model": pa.struct([("style", pa.string()), ("ground_truth", self.ground_truth_type)]),
        }

    def command(self, files: Mapping[DataSplit, Path]) -> str:
        """Return the command that trains on the tasks, or that evaluates if there are no training tasks."""
        start = "etude train grpo model.path=MODEL" if "train" in files else "etude eval model.path=MODEL"
        return " ".join([start, *options_of(files), f"reward={self.reward}"])


class SyntheticPreparation(PromptPreparation):
    """A preparation of random problems without duplicates."""

    train: int = Field(10_000, ge=1, description="number of problems for training")
    test: int = Field(500, ge=0, description="number of other problems for evaluation; they do not depend on `train`")

    def make_rows(self, skipped: SkippedRows) -> dict[DataSplit, list[Row]]:  # noqa: ARG002
        """Draw the test problems first, so that they do not depend on `train`. No problem is drawn twice."""
        seen: set[Hashable] = set()
        rows_by_split: dict[DataSplit, list[Row]] = {"train": [], "test": []}
        counts: dict[DataSplit, int] = {"test": self.test, "train": self.train}
        with progress(f"making {self.title}", self.test + self.train) as bar:
            for split, count in counts.items():
                problems = self._new_problems(random.Random(f"{self.title} {split} {self.seed}").random, seen)
                for index in range(count):
                    row = next(problems, None)
                    if row is None:
                        raise ConfigError(
                            f"{self.title} was asked for {self.train} and {self.test} problems, and with these options "
                            f"it found {len(seen)} that differ. Ask for fewer, or for more varied ones: `etude data "
                            f"prepare {self.title} --options` shows the options."
                        )
                    row["extra_info"] |= {"split": split, "index": index}
                    rows_by_split[split].append(row)
                    bar.advance()
        return rows_by_split

    def _new_problems(self, uniform: Callable[[], float], seen: set[Hashable]) -> Iterator[Row]:
        """Yield problems that were not drawn before, until there seem to be no more."""

        def draw(low: int, high: int) -> int:
            # Python guarantees only for `random()` that its numbers never change.
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
        """Draw a problem and return its key, which differs for different problems, and its row.

        The row is None if the draw gives no valid problem.
        """


def options_of(files: Mapping[DataSplit, Path]) -> list[str]:
    """Return the run options that name these files."""
    train, val = files.get("train"), files.get("val") or files.get("test")
    return [_shell_option(f"data.{name}", file) for name, file in (("train", train), ("val", val)) if file is not None]


def _shell_option(option: str, file: Path) -> str:
    """Return an option that lists a file, quoted for the shell and for the option's grammar if the path needs it."""
    if re.fullmatch(r"[\w./~-]+", str(file)):
        return f"{option}=[{file}]"
    escaped = str(file).replace("\\", "\\\\").replace("'", "\\'")
    return shlex.quote(f"{option}=['{escaped}']")


def sample_keys(keys: Sequence[str], count: int, purpose: str) -> set[str]:
    """Return `count` random keys. The choice depends on the keys and the purpose alone, and on no software version."""
    return set(sorted(keys, key=lambda key: blake2b(f"{purpose} {key}".encode(), digest_size=16).digest())[:count])
