"""`etude data`: prepare a data set, and print the tasks of a file as the model's prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.text import Text

from etude.chat import ChatConfig, ChatRenderer, Tokenizer, message_from_dict
from etude.config import Config
from etude.data import Dataset, DatasetColumns
from etude.data.prepare import Preparation, PreparedFiles, prepare_dataset
from etude.errors import ConfigError
from etude.observe import make_console
from etude.recipes.hub import data_files, locate_model
from etude.tools.rollout_reader import prompt_text

SPLIT_PURPOSES = {"train": "for training", "val": "for evaluation", "test": "for the final test"}
ANSWERS = ("chosen", "rejected")
"""The columns of the two answers of a preference pair."""


class ShowOptions(Config):
    """The options of `etude data show`."""

    columns: DatasetColumns = Field(DatasetColumns(), description="names of the columns in the file")
    chat: ChatConfig = Field(ChatConfig(), description="rendering of conversations for the model")


def prepare(preparation: Preparation) -> PreparedFiles:
    """Prepare a data set, and print the files, an example and the next command."""
    console, prepared = make_console(), prepare_dataset(preparation)
    for split, file in prepared.files.items():
        console.print(Text(f"{prepared.counts[split]:>9,} rows {SPLIT_PURPOSES[split]:<23} {file}"), soft_wrap=True)
    for line in prepared.skipped.lines():
        console.print(Text(line, "yellow"), soft_wrap=True)
    console.print()
    _show_task(console, "the first row", prepared.example, prepared.example["prompt"], None)
    if "reward_model" in prepared.example:
        _show_answer(console, prepared.example["reward_model"]["ground_truth"])
    console.print(Text.assemble("\nnext:  ", (prepared.command, "bold")), soft_wrap=True)
    return prepared


def to_dict(prepared: PreparedFiles) -> dict[str, Any]:
    """Return the result of a preparation as plain data."""
    return {
        "files": {split: str(file) for split, file in prepared.files.items()},
        "rows": dict(prepared.counts),
        "skipped": {reason: count for reason, (count, _) in prepared.skipped.reasons.items()},
        "next": prepared.command,
    }


def show(file: str, options: ShowOptions, *, first: int = 0, tasks: int = 3, model: Path | None = None) -> None:
    """Print some tasks of a file, or of a data set on the hub.

    model: a model's directory or name. Its chat template renders the tasks, and its tokens are counted.
    """
    dataset = Dataset.load(list(data_files(file)), options.columns)
    if tasks < 1 or not 0 <= first < len(dataset):
        raise ConfigError(
            f"{file} has rows 0 to {len(dataset) - 1}, and {tasks} from row {first} on were requested. Request 1 or "
            f"more, from one of these rows on: -n 3 --row 0."
        )
    console = make_console()
    directory = None if model is None else locate_model(model, "--model", weights=False)
    chat = None if directory is None else options.chat.build_renderer(Tokenizer.load(directory), directory)
    for row in range(first, min(first + tasks, len(dataset))):
        task = dataset.task(row, row)
        source = f", {task.source}" if task.source else ""
        _show_task(console, f"{dataset.location(row)}{source}", task.fields, task.fields["prompt"], chat)
        if task.fields["ground_truth"] is not None:
            _show_answer(console, task.fields["ground_truth"])
        console.print()
    console.print(Text(f"{len(dataset):,} rows{_longest(dataset, chat)}", "dim"), soft_wrap=True)


def _show_task(console: Console, title: str, row: Mapping[str, Any], prompt: Any, chat: ChatRenderer | None) -> None:
    """Print one task under its title; of a preference pair, both answers too."""
    if chat is not None:
        title += f", {len(chat.prompt_ids(prompt)):,} tokens"
    console.print(Text(title, "dim"), soft_wrap=True)
    if isinstance(prompt, str):
        rendered = prompt
    else:
        rendered = prompt_text(prompt) if chat is None else chat.render_text(list(map(message_from_dict, prompt)))
    console.print(Text(rendered), soft_wrap=True)
    for name in ANSWERS:
        if all(row.get(column) for column in ANSWERS):
            answer = prompt_text(row[name])
            console.print(Text.assemble((f"{name}: ", "bold"), answer), soft_wrap=True)


def _show_answer(console: Console, truth: Any) -> None:
    text = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    console.print(Text.assemble(("right answer: ", "bold"), text), soft_wrap=True)


def _longest(dataset: Dataset, chat: ChatRenderer | None) -> str:
    """Return the length of the longest prompt, for `data.max_prompt_length`."""
    if chat is None:
        return ""
    _, counts = dataset.filter_overlong(chat.prompt_ids, np.iinfo(np.int32).max, "filter")
    return f"; the longest prompt has {counts.reduce()['longest_prompt']:,.0f} tokens"
