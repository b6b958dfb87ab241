"""The examples of a supervised run: rows of files, read once, and those left out that teach nothing.

What a row means is said by who reads it (`demonstrations`, `preferences`). What becomes of rows that are too long, or
of which nothing can be learned, is the same for all, and is told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from etude.chat import Chat
from etude.chat.messages import REASONING_KEYS
from etude.config import Choice, Config
from etude.data.config import Files
from etude.data.dataset import Overlong
from etude.data.files import lookup
from etude.data.lessons import Answer, Example
from etude.data.sampler import SAMPLERS, Sampler, Shuffled
from etude.data.table import SOURCE, Table, opened
from etude.errors import ConfigError, DataError
from etude.observe import Last, Metrics, get_log

__all__ = ["Examples", "Shown", "ShownColumns"]

ORDERS = {name: SAMPLERS[name] for name in ("sequential", "shuffled", "weighted")}
"""A curriculum follows rewards, and nothing here earns any."""
EMPTY, LONG, EQUAL = "has nothing to learn", "is too long", "prefers an answer to itself"
WHY = {EMPTY: "have nothing to learn", EQUAL: "prefer an answer to itself"}


class ShownColumns(Config):
    """The columns that every kind of example may have."""

    tools: str = Field("tools", min_length=1, description="the column with the schemas of tools, where there are any")
    source: str = Field(
        "", description="the column that names the data source; empty is `data_source`, if there is one"
    )


class Shown(Files, ABC):
    """Where examples come from, and in which order they are learned from."""

    columns: ShownColumns = Field(ShownColumns(), description="which columns of the files mean what")
    max_tokens: int | None = Field(
        None, ge=2, description="longest row in tokens, prompt included; null is what the model's context holds"
    )
    overlong: Overlong = Field("filter", description="longer rows: leave out, cut at the end, or stop")
    sampler: Annotated[Sampler, Choice(ORDERS)] = Field(
        Shuffled(), description="in which order examples are learned from"
    )

    @abstractmethod
    def example(self, row: Mapping[str, Any], chat: Chat, where: str) -> Example:
        """What is learned from a row."""

    def longest(self, context: int) -> int:
        """The longest row that is learned from, by a model with this context."""
        if self.max_tokens is not None and self.max_tokens > context:
            raise ConfigError(
                f"`data.max_tokens={self.max_tokens}` does not fit into this model's context of {context}. Lower it."
            )
        return self.max_tokens or context

    def read(
        self, name: str, files: Sequence[str], chat: Chat, context: int, advance: Callable[[], None] = lambda: None
    ) -> Examples:
        """The examples of some files, named by the option that gave them; advance: is called after each row."""
        table, limit = Table(opened(files)), self.longest(context)
        found, thoughts = Examples(name, len(table)), 0
        for row in range(len(table)):
            values, where = table.row(row), table.where(row)
            example = self.example(values, chat, where)
            why = _unfit(example)
            if why is None and _length(example) > limit:
                if self.overlong == "error":
                    raise DataError(
                        f"{where} has {_length(example)} tokens; {limit} are allowed. Allow more with "
                        f"`data.max_tokens`, or have such rows left out (`data.overlong=filter`) or cut (`truncate`)."
                    )
                example, why = _cut(example, limit), LONG
            cut = why == LONG and self.overlong == "truncate"
            found.add(example, self._source(values), where, why, stays=cut and _unfit(example) is None)
            thoughts += _thinks(values)
            advance()
        if thoughts and not chat.shows_reasoning():
            get_log("data").warning(
                f"{thoughts} of {len(table)} rows in {name} have reasoning beside their answers, which the chat "
                f"template leaves out: nothing of it is learned. A template that shows it is set by `chat.template`."
            )
        found.tell(limit, self.overlong, given=self.max_tokens is not None)
        return found

    def _source(self, values: Mapping[str, Any]) -> str:
        found = lookup(values, self.columns.source or SOURCE)
        return "" if found is None else str(found)


class Examples:
    """What a run learns from, in the order of its files, ready; and how much of them was left out, and why."""

    def __init__(self, name: str, rows: int) -> None:
        self._name, self._rows = name, rows
        self._examples: list[Example] = []
        self._sources: list[str] = []
        self._why: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, row: int) -> Example:
        return self._examples[row]

    def first(self, count: int | None) -> Sequence[Example]:
        """The first so many of them, or all."""
        return self._examples[:count]

    def sources(self) -> list[str]:
        """The data source of each."""
        return self._sources

    def add(self, example: Example, source: str, where: str, why: str | None, *, stays: bool) -> None:
        """One more, or a reason why it is none; one that `stays` is learned from all the same."""
        if why is not None:
            self._why[why] += 1
            self._first.setdefault(why, where)
        if why is None or stays:
            self._examples.append(example)
            self._sources.append(source)

    def counts(self) -> Metrics:
        """How many rows were too long, and how many were left out, for whatever reason."""
        left = self._rows - len(self)
        return Metrics({"overlong_rows": Last.of(self._why[LONG]), "left_out_rows": Last.of(left)})

    def tell(self, limit: int, overlong: Overlong, *, given: bool) -> None:
        """Say what was left out or cut; refuse files of which nothing is left."""
        allowed = f"`data.max_tokens={limit}`" if given else f"this model's context of {limit} tokens"
        if not len(self):
            reasons = "; ".join(f"{self._first[why]} {why}" for why in self._why)
            raise DataError(
                f"None of the {self._rows} rows in {self._name} can be learned from (longer than {allowed}: "
                f"{self._why[LONG]}; with nothing to learn: {self._why[EMPTY]}; preferring an answer to itself: "
                f"{self._why[EQUAL]}). {reasons}."
            )
        done = "left out" if overlong == "filter" else "cut at the end"
        log = get_log("data")
        for why, count in self._why.items():
            how = f"are longer than {allowed}: {done}" if why == LONG else f"{WHY[why]}: left out"
            log.warning(f"{count} of {self._rows} rows in {self._name} {how}. The first is {self._first[why]}.")


def _unfit(example: Example) -> str | None:
    """Why nothing can be learned from an example, if so."""
    if not all(example):
        return EMPTY
    if len(example) > 1 and _same(example[0], example[1]):
        return EQUAL
    return None


def _same(one: Answer, other: Answer) -> bool:
    return len(one) == len(other) and all(np.array_equal(a.ids, b.ids) for a, b in zip(one, other, strict=True))


def _thinks(values: Mapping[str, Any]) -> bool:
    """Whether a row has messages with reasoning."""
    lists = (value for value in values.values() if isinstance(value, list))
    messages = (message for each in lists for message in each if isinstance(message, Mapping))
    return any(message.get(key) for message in messages for key in REASONING_KEYS)


def _length(example: Example) -> int:
    return max(len(row.ids) for answer in example for row in answer)


def _cut(example: Example, limit: int) -> Example:
    """Rows of at most so many tokens, those that still have something to learn."""
    return tuple(tuple(cut for row in answer if (cut := row.cut(limit)).learned) for answer in example)
