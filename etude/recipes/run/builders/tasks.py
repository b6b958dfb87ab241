"""Loads the tasks of a run from its files: those with prompts that fit, and that the reward can judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.chat import ChatRenderer
from etude.data import DataConfig, Dataset
from etude.errors import ConfigError, DataError
from etude.observe import get_logger
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.collect.rollout_images import check_image_count
from etude.rewards import RewardFunction


@dataclass(frozen=True)
class TaskLoader:
    """Loads the tasks of a run from its files."""

    data: DataConfig
    env: EnvConfig
    reward: RewardFunction
    chat: ChatRenderer
    for_agents: bool = False
    """True if agents get the tasks: all columns of their rows, and they need no prompt."""
    max_images: int | None = None
    """The most images of a prompt."""

    def load(self, name: str, files: Sequence[str]) -> tuple[Dataset, int]:
        """Load the tasks of some files, and return them with the number of prompts that are too long.
        `data.overlong=filter` leaves those out."""
        if self.for_agents:
            tasks = Dataset.load(files, self.data.columns, requires_prompt=False)
            tasks.check_images()
            return tasks, 0
        dataset = self._judged(Dataset.load(files, self.data.columns), name)
        first_rows: dict[str, int] = {}
        for row, source in enumerate(dataset.sources()):
            first_rows.setdefault(source, row)
        fitting, counts = dataset.filter_overlong(
            partial(self._encode, ()),
            self.data.max_prompt_length,
            self.data.overlong,
            {source: partial(self._encode, self._tools(source, dataset, row)) for source, row in first_rows.items()},
        )
        over = int(counts.reduce()["overlong_prompts"])
        if over:
            done = "left out" if self.data.overlong == "filter" else "cut at the beginning"
            get_logger("recipes").warning(
                f"{over} of {len(dataset)} prompts in {name} are longer than "
                f"`data.max_prompt_length={self.data.max_prompt_length}`: {done}."
            )
        return fitting, over

    def _encode(
        self, tools: Sequence[Mapping[str, Any]], prompt: str | Sequence[Mapping[str, Any]]
    ) -> NDArray[np.int32]:
        """Return the ids of a prompt that shows these tools."""
        rendered = self.chat.render_prompt(prompt, tools)
        check_image_count(rendered, self.max_images)
        return rendered.ids

    def _tools(self, source: str, dataset: Dataset, first_row: int) -> Sequence[Mapping[str, Any]]:
        """Return the tools that prompts of a data source show. first_row: the first row of that source."""
        environment = self.env.of_source(source)
        toolbox = None if environment is None else environment.load_toolbox()
        if environment is None or toolbox is None:
            return ()
        is_text = isinstance(dataset.task(first_row, 0).fields["prompt"], str)
        if is_text and not environment.options.gives_rewards:
            raise ConfigError(
                f"`{environment.section}.tools` offers functions by the chat template, and "
                f"{dataset.location(first_row)} has a text prompt, which is continued without one. Give prompts as "
                "messages."
            )
        return toolbox.schemas

    def _judged(self, dataset: Dataset, name: str) -> Dataset:
        """Return the tasks to which the reward can judge an answer; refuse files without any."""
        if type(self.reward).check is RewardFunction.check:
            return dataset
        judgeable, why = np.ones(len(dataset), dtype=bool), ""
        for row in range(len(dataset)):
            task = dataset.task(row, row)
            try:
                self.reward.check(task)
            except DataError as error:
                judgeable[row], why = False, why or f"{dataset.location(row)}: {error}"
        if judgeable.all():
            return dataset
        if not judgeable.any():
            remedy = " Where only the environment gives rewards: `reward=environment`."
            none = f"None of the {len(dataset)} tasks in {name} can be judged."
            raise DataError(f"{none} {why}{remedy if self.env.has_environment else ''}")
        num_skipped = int((~judgeable).sum())
        get_logger("recipes").warning(
            f"{num_skipped} of {len(dataset)} tasks in {name} cannot be judged: left out. {why}"
        )
        return dataset.select(judgeable)
