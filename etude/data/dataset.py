"""The dataset: rows of files as tasks.

The columns are verl's or TRL's as they are: `prompt` (text or messages) and an answer in `reward_model.ground_truth`,
`ground_truth`, `answer` or `solution`; `data_source`, `ability` and `extra_info` where there are any. Others are named
in `Columns`. A task carries every column of its row under its own name, and beside them `prompt`, `ground_truth`,
`extra_info` and `row`, which are always there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from etude.config import Config
from etude.data.files import Rows, lookup
from etude.data.prompts import plain_prompt, spoken
from etude.data.table import SOURCE, Source, Table, opened
from etude.errors import DataError
from etude.observe import Max, Metrics, Sum
from etude.records import Message, Task

__all__ = ["Columns", "Dataset", "Overlong"]

ANSWERS = ("reward_model.ground_truth", "ground_truth", "answer", "solution")

Overlong = Literal["filter", "truncate", "error"]
PromptIds = Callable[[str | Sequence[Message]], NDArray[np.int32]]


class Columns(Config):
    """Which columns of the files mean what. A dotted path leads into a column that holds mappings."""

    prompt: str = Field("prompt", min_length=1, description="the column with what is asked: text, or messages")
    answer: str = Field("", description="the column with the right answer; empty is verl's or TRL's, if there is one")
    source: str = Field(
        "", description="the column that names the data source; empty is `data_source`, if there is one"
    )


AS_THEY_ARE = Columns()


class Dataset(Table):
    """Rows of one or several files, in their order. A row becomes a `Task` when it is asked for."""

    def __init__(self, parts: Sequence[Rows], columns: Columns, *, prompted: bool = True) -> None:
        """prompted: whether every row asks something of the model itself; what an agent is given need not."""
        super().__init__(parts)
        self._columns, self._prompted = columns, prompted

    @classmethod
    def load(cls, data: Source, columns: Columns = AS_THEY_ARE, *, prompted: bool = True) -> Self:
        """Files, one after the other, each a path or `module:Name`; or a Python iterable of mappings.

        What is asked for and not there is told now, as far as the first row of each file shows it.
        """
        dataset = cls(opened(data), columns, prompted=prompted)
        for row in dataset.firsts:
            dataset.task(row, 0)
        return dataset

    def task(self, row: int, ordinal: int) -> Task:
        """The task of a row, as the `ordinal`-th of a run."""
        values = self.row(row)
        prompt = self._needed(values, self._columns.prompt, row) if self._prompted else values.get("prompt")
        fields = values | {
            "prompt": plain_prompt(prompt, self.where(row)) if self._prompted else prompt,
            "ground_truth": self._answer(values, row),
            "extra_info": values.get("extra_info") or {},
            "row": row,
        }
        return Task(ordinal, fields, self._source(values, row))

    def sources(self) -> list[str]:
        """The data source of each row."""
        return ["" if value is None else str(value) for value in self.column(self._columns.source or SOURCE)]

    def fitting(self, prompt_ids: PromptIds, max_prompt: int, how: Overlong) -> tuple[Dataset, Metrics]:
        """What is to be asked when a prompt may have `max_prompt` tokens, and how many prompts had more.

        `filter` leaves the longer ones out, and rows are then counted without them. `truncate` keeps them: whoever asks
        cuts their first tokens off. `error` names the first.
        """
        values = self.column(self._columns.prompt)
        prompts = (plain_prompt(value, self.where(row)) for row, value in enumerate(values))
        lengths = np.array([len(prompt_ids(spoken(prompt))) for prompt in prompts], dtype=np.int64)
        fits = lengths <= max_prompt
        if how == "error" and not fits.all():
            first = int(np.argmin(fits))
            raise DataError(
                f"{self.where(first)} has a prompt of {lengths[first]} tokens; {max_prompt} are allowed. Allow more, "
                f"or have such rows left out (`filter`) or cut off at their beginning (`truncate`)."
            )
        if how == "filter" and not fits.any():
            raise DataError(
                f"Every one of the {len(self)} prompts is longer than the {max_prompt} tokens that are allowed, so "
                f"nothing is left to ask: the shortest has {lengths.min()}. Allow more."
            )
        over = int((~fits).sum())
        counts = Metrics(
            {"prompts": Sum.of(len(self)), "overlong_prompts": Sum.of(over), "longest_prompt": Max.of(lengths.max())}
        )
        if how != "filter" or not over:
            return self, counts
        return self.only(fits), counts

    # -- small parts --------------------------------------------------------------------------------------------------

    def _needed(self, values: Mapping[str, Any], path: str, row: int) -> Any:
        return self.needed(values, path, row, "data.columns.prompt=question")

    def _answer(self, values: Mapping[str, Any], row: int) -> Any:
        if self._columns.answer:
            return self._needed(values, self._columns.answer, row)
        return next((found for path in ANSWERS if (found := lookup(values, path)) is not None), None)

    def _source(self, values: Mapping[str, Any], row: int) -> str:
        if self._columns.source:
            return str(self._needed(values, self._columns.source, row))
        found = lookup(values, SOURCE)
        return "" if found is None else str(found)
