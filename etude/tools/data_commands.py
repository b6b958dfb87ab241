"""`etude data`: what a preparation made of a data set, and the tasks of a file as a model would be asked them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.text import Text

from etude.chat import ChatConfig, ChatRenderer, Tokenizer
from etude.config import Config
from etude.data import Dataset, DatasetColumns, parse_prompt
from etude.data.prepare import Preparation, PreparedFiles, prepare_dataset
from etude.errors import ConfigError
from etude.observe import make_console
from etude.recipes.hub import data_files, locate_model

__all__ = ["ShowOptions", "prepare", "show", "to_dict"]

SPLIT_PURPOSES = {"train": "to train on", "val": "to score on meanwhile", "test": "to score on in the end"}
ANSWERS = ("chosen", "rejected")
"""The columns of a preference pair beside its prompt."""


class ShowOptions(Config):
    """How the tasks of a file are read and shown."""

    columns: DatasetColumns = Field(DatasetColumns(), description="which columns of the file mean what")
    chat: ChatConfig = Field(ChatConfig(), description="how the model is shown conversations")


def prepare(preparation: Preparation, console: Console | None = None) -> PreparedFiles:
    """Prepare a data set, and say what came of it and what to type next."""
    console = make_console() if console is None else console
    done = prepare_dataset(preparation, console)
    for split, file in done.files.items():
        console.print(Text(f"{done.counts[split]:>9,} rows {SPLIT_PURPOSES[split]:<23} {file}"), soft_wrap=True)
    for line in done.skipped.lines():
        console.print(Text(line, "yellow"), soft_wrap=True)
    console.print()
    _show(console, "the first one", done.example, done.example["prompt"], None)
    if "reward_model" in done.example:
        _show_answer(console, done.example["reward_model"]["ground_truth"])
    console.print(Text.assemble("\nnext:  ", (done.command, "bold")), soft_wrap=True)
    return done


def to_dict(done: PreparedFiles) -> dict[str, Any]:
    """What came of a preparation, as plain data."""
    return {
        "files": {split: str(file) for split, file in done.files.items()},
        "rows": dict(done.counts),
        "skipped": {why: count for why, (count, _) in done.skipped.reasons.items()},
        "next": done.command,
    }


def show(
    file: str,
    shown: ShowOptions,
    *,
    first: int = 0,
    tasks: int = 3,
    model: Path | None = None,
    console: Console | None = None,
) -> None:
    """Show some tasks of a file, or of a data set on the hub.

    model: a model's directory or its name, whose chat template shows the tasks and whose tokens are counted.
    """
    dataset = Dataset.load(list(data_files(file)), shown.columns)
    if tasks < 1 or not 0 <= first < len(dataset):
        raise ConfigError(
            f"{file} has rows 0 to {len(dataset) - 1}, and {tasks} from row {first} on were asked for. Ask for 1 or "
            f"more, from one of these on: -n 3 --row 0."
        )
    console = make_console() if console is None else console
    chat = (
        None
        if model is None
        else shown.chat.build_renderer(Tokenizer.load(locate_model(model, "--model", weights=False)))
    )
    for row in range(first, min(first + tasks, len(dataset))):
        task = dataset.task(row, row)
        source = f", {task.source}" if task.source else ""
        _show(console, f"{dataset.location(row)}{source}", task.fields, task.fields["prompt"], chat)
        if task.fields["ground_truth"] is not None:
            _show_answer(console, task.fields["ground_truth"])
        console.print()
    console.print(Text(f"{len(dataset):,} rows{_longest(dataset, chat)}", "dim"), soft_wrap=True)


def _show(console: Console, title: str, row: Mapping[str, Any], prompt: Any, chat: ChatRenderer | None) -> None:
    """One task under its title; of a preference pair, both answers too."""
    asked = parse_prompt(prompt)
    if chat is not None:
        title += f", {len(chat.prompt_ids(asked)):,} tokens"
    console.print(Text(title, "dim"), soft_wrap=True)
    rendered = asked if isinstance(asked, str) else _lines(prompt) if chat is None else chat.render_text(asked)
    console.print(Text(rendered), soft_wrap=True)
    for name in ANSWERS:
        if all(row.get(each) for each in ANSWERS):
            answer = row[name] if isinstance(row[name], str) else _lines(row[name])
            console.print(Text.assemble((f"{name}: ", "bold"), answer), soft_wrap=True)


def _show_answer(console: Console, truth: Any) -> None:
    written = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    console.print(Text.assemble(("right answer: ", "bold"), written), soft_wrap=True)


def _lines(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as a person reads it."""
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def _longest(dataset: Dataset, chat: ChatRenderer | None) -> str:
    """How long prompts are, which is what `data.max_prompt_length` must allow."""
    if chat is None:
        return ""
    _, counts = dataset.filter_overlong(chat.prompt_ids, np.iinfo(np.int32).max, "filter")
    return f"; the longest prompt has {counts.reduce()['longest_prompt']:,.0f} tokens"
