"""The examples of a supervised run: the rows of files, read once, without rows that have nothing to learn.

`demonstrations` and `preferences` define the meaning of a row. Rows that are too long or have nothing to learn are
handled here for both, and reported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from etude.chat import ChatRenderer
from etude.chat.messages import REASONING_KEYS
from etude.config import Choice, Config
from etude.data.config import DataFiles
from etude.data.dataset import OverlongHandling
from etude.data.example_images import ExampleImage, ExampleImages
from etude.data.files import DATA_SOURCE_COLUMN, lookup
from etude.data.sampler import SAMPLERS, Sampler, ShuffledSampler
from etude.data.table import RowTable, open_sources
from etude.data.task_images import TaskImages
from etude.data.tokenization import AnswerRows, Example
from etude.errors import ConfigError, DataError
from etude.observe import Last, Metrics, get_logger

SUPERVISED_SAMPLERS = {name: SAMPLERS[name] for name in ("sequential", "shuffled", "weighted")}
"""The samplers for examples. A curriculum needs rewards, and examples have none."""
NOTHING_TO_LEARN = "has nothing to learn"
TOO_LONG = "is too long"
EQUAL_ANSWERS = "prefers an answer to itself"
SKIP_MESSAGES = {NOTHING_TO_LEARN: "have nothing to learn", EQUAL_ANSWERS: "prefer an answer to itself"}


class SupervisedColumns(Config):
    """The columns that every kind of example can have."""

    tools: str = Field("tools", min_length=1, description="column of the tools' schemas, if there are any")
    source: str = Field("", description="column of the data source's name; empty is `data_source`, if there is one")


class SupervisedDataConfig(DataFiles, ABC):
    """The source of the examples, and their order."""

    columns: SupervisedColumns = Field(SupervisedColumns(), description="columns of the files with the examples")
    max_tokens: int | None = Field(
        None,
        ge=2,
        description="most tokens of a row, prompt included; larger keeps longer rows and uses more memory; null is the "
        "model's context",
    )
    overlong: OverlongHandling = Field(
        "filter",
        description="longer rows: `filter` leaves them out, `truncate` cuts their end, `error` stops the run",
    )
    sampler: Annotated[Sampler, Choice(SUPERVISED_SAMPLERS)] = Field(
        ShuffledSampler(), description="order of the examples"
    )

    @abstractmethod
    def tokenize_row(self, row: Mapping[str, Any], chat: ChatRenderer, where: str, images: TaskImages) -> Example:
        """Tokenize a row as an example. where: the row's name in errors. images: reads those of the row."""

    def max_row_tokens(self, context_length: int) -> int:
        """Return the most tokens of a row, for a model with this context."""
        if self.max_tokens is not None and self.max_tokens > context_length:
            raise ConfigError(
                f"`data.max_tokens={self.max_tokens}` does not fit into this model's context of {context_length}. "
                "Lower it."
            )
        return self.max_tokens or context_length

    def load_examples(
        self,
        name: str,
        files: Sequence[str],
        chat: ChatRenderer,
        context_length: int,
        on_row: Callable[[], None] = lambda: None,
        *,
        max_images: int | None = None,
    ) -> Examples:
        """Load the examples of files. name: the option that names the files. on_row: a callback after each row.
        max_images: the most images of an example."""
        table = RowTable(open_sources(files))
        limit = self.max_row_tokens(context_length)
        examples = Examples(name, len(table), ExampleImages(name, table))
        rows_with_reasoning = 0
        for row in range(len(table)):
            values, where = table.row(row), table.location(row)
            images = TaskImages(where, table.directory(row))
            example = self.tokenize_row(values, chat, where, images)
            _check_image_count(example, max_images, where)
            reason = _skip_reason(example)
            if reason is None and _max_length(example) > limit:
                if self.overlong == "error":
                    raise DataError(
                        f"{where} has {_max_length(example)} tokens; {limit} are allowed. Allow more with "
                        f"`data.max_tokens`, leave such rows out (`data.overlong=filter`), or cut them (`truncate`)."
                    )
                example, reason = _truncate(example, limit), TOO_LONG
            truncated = reason == TOO_LONG and self.overlong == "truncate"
            keep = truncated and _skip_reason(example) is None
            examples.add(example, row, self._source(values), where, reason, keep=keep, paths=images.paths)
            rows_with_reasoning += _has_reasoning(values)
            on_row()
        if rows_with_reasoning and not chat.shows_reasoning():
            get_logger("data").warning(
                f"{rows_with_reasoning} of {len(table)} rows in {name} have reasoning beside their answers, which the "
                f"chat template leaves out: the model does not learn it. Set a template that shows it with "
                f"`chat.template`."
            )
        examples.report_skipped(limit, self.overlong, explicit=self.max_tokens is not None)
        return examples

    def _source(self, values: Mapping[str, Any]) -> str:
        value = lookup(values, self.columns.source or DATA_SOURCE_COLUMN)
        return "" if value is None else str(value)


class Examples:
    """The tokenized examples of a run, in the order of its files, and counts of the rows left out with the reasons.

    The bytes of images are not kept: they are read again whenever a pass needs them.
    """

    def __init__(self, name: str, rows: int, images: ExampleImages) -> None:
        """images: those of the rows of the files."""
        self._name = name
        self._rows = rows
        self._images = images
        self._examples: list[Example] = []
        self._row_of: list[int] = []
        self._sources: list[str] = []
        self._skip_counts: Counter[str] = Counter()
        self._first_skipped: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, row: int) -> Example:
        return self._examples[row]

    def images(self, index: int) -> Mapping[str, ExampleImage]:
        """Return handles to the images of an example, by digest."""
        shown = dict.fromkeys(span.digest for answer in self._examples[index] for row in answer for span in row.images)
        return {digest: ExampleImage(self._images, self._row_of[index], digest) for digest in shown}

    def sources(self) -> list[str]:
        """Return the data source of each example."""
        return self._sources

    def add(
        self,
        example: Example,
        row: int,
        source: str,
        where: str,
        skip_reason: str | None,
        *,
        keep: bool,
        paths: Mapping[str, str],
    ) -> None:
        """Add the example of a row, or count the reason to skip it.

        keep: add it in spite of a reason. paths: of its images that are files, by digest.
        """
        if skip_reason is not None:
            self._skip_counts[skip_reason] += 1
            self._first_skipped.setdefault(skip_reason, where)
        if skip_reason is None or keep:
            self._examples.append(example)
            self._images.note_paths(row, paths)
            self._row_of.append(row)
            self._sources.append(source)

    def skip_metrics(self) -> Metrics:
        """Return the counts of rows that were too long, and of rows left out for any reason."""
        skipped = self._rows - len(self)
        return Metrics({"overlong_rows": Last.of(self._skip_counts[TOO_LONG]), "skipped_rows": Last.of(skipped)})

    def report_skipped(self, limit: int, overlong: OverlongHandling, *, explicit: bool) -> None:
        """Log the rows that were left out or cut. Refuse files without any example."""
        allowed = f"`data.max_tokens={limit}`" if explicit else f"this model's context of {limit} tokens"
        if not len(self):
            reasons = "; ".join(f"{self._first_skipped[reason]} {reason}" for reason in self._skip_counts)
            raise DataError(
                f"None of the {self._rows} rows in {self._name} can be learned from (longer than {allowed}: "
                f"{self._skip_counts[TOO_LONG]}; with nothing to learn: {self._skip_counts[NOTHING_TO_LEARN]}; "
                f"preferring an answer to itself: {self._skip_counts[EQUAL_ANSWERS]}). {reasons}."
            )
        action = "left out" if overlong == "filter" else "cut at the end"
        log = get_logger("data")
        for reason, count in self._skip_counts.items():
            outcome = (
                f"are longer than {allowed}: {action}" if reason == TOO_LONG else f"{SKIP_MESSAGES[reason]}: left out"
            )
            log.warning(
                f"{count} of {self._rows} rows in {self._name} {outcome}. The first is {self._first_skipped[reason]}."
            )


def _check_image_count(example: Example, max_images: int | None, where: str) -> None:
    """Refuse an answer with too many images before it."""
    count = max((sum(span.first == 0 for span in row.images) for answer in example for row in answer), default=0)
    if max_images is not None and count > max_images:
        raise DataError(
            f"{where} has {count} images, and `vision.max_images` is {max_images}. Raise it, or leave such rows out."
        )


def _skip_reason(example: Example) -> str | None:
    """Return the reason to skip an example, if there is one."""
    if not all(example):
        return NOTHING_TO_LEARN
    if len(example) > 1 and _equal_answers(example[0], example[1]):
        return EQUAL_ANSWERS
    return None


def _equal_answers(one: AnswerRows, other: AnswerRows) -> bool:
    return len(one) == len(other) and all(np.array_equal(a.ids, b.ids) for a, b in zip(one, other, strict=True))


def _has_reasoning(values: Mapping[str, Any]) -> bool:
    """Return True if a row has messages with reasoning."""
    lists = (value for value in values.values() if isinstance(value, list))
    messages = (message for message_list in lists for message in message_list if isinstance(message, Mapping))
    return any(message.get(key) for message in messages for key in REASONING_KEYS)


def _max_length(example: Example) -> int:
    return max(len(row.ids) for answer in example for row in answer)


def _truncate(example: Example, limit: int) -> Example:
    """Cut the rows to `limit` tokens, and drop rows that then have nothing to learn."""
    return tuple(
        tuple(truncated for row in answer if (truncated := row.truncate(limit)).num_trained_tokens)
        for answer in example
    )
