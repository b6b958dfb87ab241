"""The dataset: the rows of files as tasks.

Files with verl's or TRL's columns need no options: `prompt` (text or messages) and an answer in
`reward_model.ground_truth`, `ground_truth`, `answer` or `solution`. `data_source`, `ability` and `extra_info` are
optional. `DatasetColumns` names other columns. A task has every column of its row under its own name. Besides them it
always has `prompt`, `ground_truth`, `extra_info` and `row`. Images are in `images` or in the prompt (`task_images`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from etude.config import Config
from etude.data.files import DATA_SOURCE_COLUMN, RowSource, column_paths, lookup, missing_column
from etude.data.prompts import check_prompt
from etude.data.table import DatasetLike, RowTable, open_sources
from etude.data.task_images import IMAGE_COLUMNS, TaskImages, find_image_column
from etude.errors import ChatError, DataError, ImageError
from etude.observe import Max, Metrics, Sum
from etude.records import Task

GROUND_TRUTH_PATHS = ("reward_model.ground_truth", "ground_truth", "answer", "solution")

ROWS_WITH_IMAGES = 16
"""The rows that are in memory at a time where they may have images."""

OverlongHandling = Literal["filter", "truncate", "error"]
PromptIds = Callable[[str | Sequence[Mapping[str, Any]]], NDArray[np.int32]]


class DatasetColumns(Config):
    """The names of columns. A dotted path leads into a column of mappings."""

    prompt: str = Field("prompt", min_length=1, description="column of the prompt, which is text or messages")
    answer: str = Field("", description="column of the right answer; empty is verl's or TRL's, if there is one")
    source: str = Field("", description="column of the data source's name; empty is `data_source`, if there is one")


DEFAULT_COLUMNS = DatasetColumns()


class Dataset(RowTable):
    """The rows of one or more files, in order. A row becomes a `Task` on access."""

    def __init__(self, parts: Sequence[RowSource], columns: DatasetColumns, *, requires_prompt: bool = True) -> None:
        """requires_prompt: True if every row must have a prompt for the model; a task for an agent needs none."""
        super().__init__(parts)
        self._columns = columns
        self._requires_prompt = requires_prompt

    @classmethod
    def load(
        cls, data: DatasetLike, columns: DatasetColumns = DEFAULT_COLUMNS, *, requires_prompt: bool = True
    ) -> Self:
        """Open files in order, each a path or `module:Name`, or a Python iterable of mappings.

        A missing column is an error now, as far as the first row of each file shows it.
        """
        dataset = cls(open_sources(data), columns, requires_prompt=requires_prompt)
        for row in dataset.first_rows:
            dataset.task(row, 0)
        return dataset

    def task(self, row: int, ordinal: int) -> Task:
        """Return the task of a row, as the `ordinal`-th task of a run."""
        values = self.row(row)
        prompt = (
            self._require_column(values, self._columns.prompt, row) if self._requires_prompt else values.get("prompt")
        )
        images = TaskImages(self.location(row), self.directory(row))
        column = find_image_column(values)
        prompt, shown = images.place(prompt, values.get(column), as_messages=self._requires_prompt)
        replaced = {"prompt": prompt, column: shown}
        values = {name: replaced[name] if name in replaced else images.read_all(values[name]) for name in values}
        fields = values | {
            "prompt": check_prompt(prompt, self.location(row)) if self._requires_prompt else prompt,
            "ground_truth": self._ground_truth(values, row),
            "extra_info": values.get("extra_info") or {},
            "row": row,
        }
        return Task(ordinal, fields, self._data_source(values, row), images.contents)

    def check_images(self) -> None:
        """Refuse a row whose images are missing or no images. Without any, only the columns of images are read."""
        in_columns = (value for values in self.columns(IMAGE_COLUMNS, ROWS_WITH_IMAGES) for value in values)
        if any(in_columns) or any(self.task(row, 0).images for row in self.first_rows):
            for row in range(len(self)):
                self.task(row, row)

    def sources(self) -> list[str]:
        """Return the data source of each row."""
        return [
            "" if value is None else str(value) for value in self.column(self._columns.source or DATA_SOURCE_COLUMN)
        ]

    def filter_overlong(
        self,
        prompt_ids: PromptIds,
        max_prompt_length: int,
        overlong: OverlongHandling,
        prompt_ids_of: Mapping[str, PromptIds] = MappingProxyType({}),
    ) -> tuple[Dataset, Metrics]:
        """Return the dataset for prompts of at most `max_prompt_length` tokens, and counts of the longer prompts.
        prompt_ids_of: encodes the prompts of a data source, instead of `prompt_ids`.

        `filter` leaves rows with longer prompts out, and row numbers then skip them. `truncate` keeps them:
        `DataConfig.truncate` cuts their first tokens later. `error` raises an error that names the first.
        """
        values = self.columns((self._columns.prompt, *IMAGE_COLUMNS), ROWS_WITH_IMAGES)
        encoders = [prompt_ids_of.get(source, prompt_ids) for source in self.sources()]
        found = [self._length(row, prompt, images, encoders[row]) for row, (prompt, *images) in enumerate(values)]
        lengths = np.array(found, dtype=np.int64)
        self._check_cuts(lengths > max_prompt_length if overlong == "truncate" else np.zeros(len(lengths), np.bool_))
        fits = lengths <= max_prompt_length
        if overlong == "error" and not fits.all():
            first = int(np.argmin(fits))
            raise DataError(
                f"{self.location(first)} has a prompt of {lengths[first]} tokens; {max_prompt_length} are allowed. "
                f"Allow more, leave such rows out (`filter`), or cut their beginning (`truncate`)."
            )
        if overlong == "filter" and not fits.any():
            raise DataError(
                f"Every one of the {len(self)} prompts is longer than the {max_prompt_length} tokens that are allowed, "
                f"so no prompt is left: the shortest has {lengths.min()}. Raise `data.max_prompt_length`."
            )
        num_overlong = int((~fits).sum())
        counts = Metrics(
            {
                "prompts": Sum.of(len(self)),
                "overlong_prompts": Sum.of(num_overlong),
                "longest_prompt": Max.of(lengths.max()),
            }
        )
        if overlong != "filter" or not num_overlong:
            return self, counts
        return self.select(fits), counts

    def _length(self, row: int, prompt: Any, images: Sequence[Any], prompt_ids: PromptIds) -> int:
        """Return the number of tokens of a prompt, with those of its images."""
        try:
            reader = TaskImages(self.location(row), self.directory(row))
            placed, _ = reader.place(prompt, next(filter(None, images), None))
            return len(prompt_ids(check_prompt(placed, self.location(row))))
        except (ChatError, ImageError) as error:
            said = str(error)
            place = self.location(row)
            raise DataError(said if place in said else f"{place}: {said}") from error

    def _check_cuts(self, cut: NDArray[np.bool_]) -> None:
        """Refuse to cut a prompt with images. cut: of each row, whether its prompt is cut."""
        for row in np.flatnonzero(cut).tolist():
            if self.task(row, row).images:
                raise DataError(
                    f"{self.location(row)} has a prompt with images that is too long, and images cannot be cut. Allow "
                    "more tokens, or leave such rows out (`filter`)."
                )

    # -- columns ------------------------------------------------------------------------------------------------------

    def _require_column(self, values: Mapping[str, Any], path: str, row: int) -> Any:
        value = lookup(values, path)
        if value is None and path not in set(column_paths(values)):
            raise missing_column(self.location(row), path, values, "data.columns.prompt=question")
        return value

    def _ground_truth(self, values: Mapping[str, Any], row: int) -> Any:
        if self._columns.answer:
            return self._require_column(values, self._columns.answer, row)
        return next((value for path in GROUND_TRUTH_PATHS if (value := lookup(values, path)) is not None), None)

    def _data_source(self, values: Mapping[str, Any], row: int) -> str:
        if self._columns.source:
            return str(self._require_column(values, self._columns.source, row))
        value = lookup(values, DATA_SOURCE_COLUMN)
        return "" if value is None else str(value)
