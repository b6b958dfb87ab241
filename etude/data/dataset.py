"""The dataset: rows of files as tasks.

The columns are verl's or TRL's as they are: `prompt` (text or messages) and an answer in `reward_model.ground_truth`,
`ground_truth`, `answer` or `solution`; `data_source`, `ability` and `extra_info` where there are any. Others are named
in `Columns`. A task carries every column of its row under its own name, and beside them `prompt`, `ground_truth`,
`extra_info` and `row`, which are always there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, compress
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from etude.config import Config, load_plugin
from etude.data.files import Rows, lookup, names, read, rows_of
from etude.data.prompts import plain_prompt, spoken
from etude.errors import ConfigError, DataError
from etude.observe import Max, Metrics, Sum
from etude.records import Message, Task

__all__ = ["Columns", "Dataset", "Overlong"]

ANSWERS = ("reward_model.ground_truth", "ground_truth", "answer", "solution")
SOURCE = "data_source"
CHUNK = 1024

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


class Dataset:
    """Rows of one or several files, in their order. A row becomes a `Task` when it is asked for."""

    def __init__(self, parts: Sequence[Rows], columns: Columns, kept: NDArray[np.int64] | None = None) -> None:
        self._parts, self._columns, self._kept = tuple(parts), columns, kept
        self._ends = list(accumulate(len(part) for part in parts))

    @classmethod
    def load(
        cls,
        data: str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]],
        columns: Columns = AS_THEY_ARE,
    ) -> Self:
        """Files, one after the other, each a path or `module:Name`; or a Python iterable of mappings.

        `module:Name` is an iterable of mappings, or a function without arguments that returns one. What is asked for
        and not there is told now, as far as the first row of each file shows it.
        """
        given = [data] if isinstance(data, str | Path) else data
        if isinstance(given, Sequence) and all(isinstance(each, str | Path) for each in given):
            if not given:
                raise ConfigError("No data was named. Give at least one file.")
            parts = [_open(str(each)) for each in given]
        else:
            parts = [rows_of(given, "The data given")]
        for part in parts:
            if not len(part):
                raise DataError(f"{part.name} has no rows. Give data with at least one, or leave it out.")
        dataset = cls(parts, columns)
        for start in [0, *dataset._ends[:-1]]:
            dataset.task(start, 0)
        return dataset

    def __len__(self) -> int:
        return self._ends[-1] if self._kept is None else len(self._kept)

    def task(self, row: int, ordinal: int) -> Task:
        """The task of a row, as the `ordinal`-th of a run."""
        part, index = self._place(row)
        values = part.row(index)
        prompt = plain_prompt(self._needed(values, self._columns.prompt, row), self.where(row))
        fields = values | {
            "prompt": prompt,
            "ground_truth": self._answer(values, row),
            "extra_info": values.get("extra_info") or {},
            "row": row,
        }
        return Task(ordinal, fields, self._source(values, row))

    def where(self, row: int) -> str:
        """What an error calls a row: its file and its place there."""
        part, index = self._place(row)
        return f"{part.name}, row {index}"

    def sources(self) -> list[str]:
        """The data source of each row."""
        return ["" if value is None else str(value) for value in self._column(self._columns.source or SOURCE)]

    def fitting(self, prompt_ids: PromptIds, max_prompt: int, how: Overlong) -> tuple[Dataset, Metrics]:
        """What is to be asked when a prompt may have `max_prompt` tokens, and how many prompts had more.

        `filter` leaves the longer ones out, and rows are then counted without them. `truncate` keeps them: whoever asks
        cuts their first tokens off. `error` names the first.
        """
        values = self._column(self._columns.prompt)
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

    def only(self, wanted: NDArray[np.bool_]) -> Dataset:
        """[rows] → the rows that are wanted; the others are no longer counted."""
        rows = np.arange(len(self)) if self._kept is None else self._kept
        return Dataset(self._parts, self._columns, rows[wanted])

    # -- small parts --------------------------------------------------------------------------------------------------

    def _place(self, row: int) -> tuple[Rows, int]:
        assert 0 <= row < len(self), f"row {row} of {len(self)}"
        place = row if self._kept is None else int(self._kept[row])
        part = bisect_right(self._ends, place)
        return self._parts[part], place - (self._ends[part - 1] if part else 0)

    def _column(self, path: str) -> Iterator[Any]:
        """A column of all rows, some at a time."""
        kept = np.full(self._ends[-1], self._kept is None)
        if self._kept is not None:
            kept[self._kept] = True
        for part, end in zip(self._parts, self._ends, strict=True):
            for start in range(0, len(part), CHUNK):
                stop = min(start + CHUNK, len(part))
                mine = kept[end - len(part) :][start:stop]
                yield from compress(part.values(path, start, stop), mine)

    def _needed(self, values: Mapping[str, Any], path: str, row: int) -> Any:
        """A column that was named, or has to be there."""
        found = lookup(values, path)
        if found is None and path not in set(names(values)):
            raise DataError(
                f"{self.where(row)} has no column `{path}`; it has {', '.join(names(values))}. "
                f"Say which is meant with `data.columns`, such as `data.columns.prompt=question`."
            )
        return found

    def _answer(self, values: Mapping[str, Any], row: int) -> Any:
        if self._columns.answer:
            return self._needed(values, self._columns.answer, row)
        return next((found for path in ANSWERS if (found := lookup(values, path)) is not None), None)

    def _source(self, values: Mapping[str, Any], row: int) -> str:
        if self._columns.source:
            return str(self._needed(values, self._columns.source, row))
        found = lookup(values, SOURCE)
        return "" if found is None else str(found)


def _open(data: str) -> Rows:
    """A path, or `module:Name` where no file is called so."""
    path = Path(data).expanduser()
    if path.exists() or ":" not in data:
        return read(path)
    found = load_plugin(data, None)
    items = found() if callable(found) else found
    if not isinstance(items, Iterable):
        raise ConfigError(
            f"The data `{data}` is a {type(items).__name__}; it must be an iterable of mappings, or a function without "
            f"arguments that returns one."
        )
    return rows_of(items, data)
