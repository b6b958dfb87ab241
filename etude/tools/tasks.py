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

from etude.chat import Chat, ChatConfig, Tokenizer
from etude.config import Config
from etude.data import Columns, Dataset, spoken
from etude.data.prepare import Preparation, Prepared, prepared
from etude.errors import ConfigError
from etude.observe import make_console
from etude.recipes.hub import data_files, model_at

__all__ = ["Shown", "prepare", "show", "told"]

FOR = {"train": "to train on", "val": "to score on meanwhile", "test": "to score on in the end"}
ANSWERS = ("chosen", "rejected")
"""The columns of a preference pair beside its prompt."""


class Shown(Config):
    """How the tasks of a file are read and shown."""

    columns: Columns = Field(Columns(), description="which columns of the file mean what")
    chat: ChatConfig = Field(ChatConfig(), description="how the model is shown conversations")


def prepare(asked: Preparation, console: Console | None = None) -> Prepared:
    """Prepare a data set, and say what came of it and what to type next."""
    console = make_console() if console is None else console
    done = prepared(asked, console)
    for split, file in done.files.items():
        console.print(Text(f"{done.counts[split]:>9,} rows {FOR[split]:<23} {file}"), soft_wrap=True)
    for line in done.left_out.lines():
        console.print(Text(line, "yellow"), soft_wrap=True)
    console.print()
    _show(console, "the first one", done.example, done.example["prompt"], None)
    if "reward_model" in done.example:
        _right(console, done.example["reward_model"]["ground_truth"])
    console.print(Text.assemble("\nnext:  ", (done.command, "bold")), soft_wrap=True)
    return done


def told(done: Prepared) -> dict[str, Any]:
    """What came of a preparation, as plain data."""
    return {
        "files": {split: str(file) for split, file in done.files.items()},
        "rows": dict(done.counts),
        "left_out": {why: count for why, (count, _) in done.left_out.found.items()},
        "next": done.command,
    }


def show(
    file: str,
    shown: Shown,
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
    chat = None if model is None else shown.chat.chat(Tokenizer.load(model_at(model, "--model", weights=False)))
    for row in range(first, min(first + tasks, len(dataset))):
        task = dataset.task(row, row)
        source = f", {task.source}" if task.source else ""
        _show(console, f"{dataset.where(row)}{source}", task.fields, task.fields["prompt"], chat)
        if task.fields["ground_truth"] is not None:
            _right(console, task.fields["ground_truth"])
        console.print()
    console.print(Text(f"{len(dataset):,} rows{_longest(dataset, chat)}", "dim"), soft_wrap=True)


def _show(console: Console, title: str, row: Mapping[str, Any], prompt: Any, chat: Chat | None) -> None:
    """One task under its title; of a preference pair, both answers too."""
    asked = spoken(prompt)
    if chat is not None:
        title += f", {len(chat.prompt_ids(asked)):,} tokens"
    console.print(Text(title, "dim"), soft_wrap=True)
    rendered = asked if isinstance(asked, str) else _lines(prompt) if chat is None else chat.text(asked)
    console.print(Text(rendered), soft_wrap=True)
    for name in ANSWERS:
        if all(row.get(each) for each in ANSWERS):
            answer = row[name] if isinstance(row[name], str) else _lines(row[name])
            console.print(Text.assemble((f"{name}: ", "bold"), answer), soft_wrap=True)


def _right(console: Console, truth: Any) -> None:
    written = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    console.print(Text.assemble(("right answer: ", "bold"), written), soft_wrap=True)


def _lines(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as a person reads it."""
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def _longest(dataset: Dataset, chat: Chat | None) -> str:
    """How long prompts are, which is what `data.max_prompt` must allow."""
    if chat is None:
        return ""
    _, counts = dataset.fitting(chat.prompt_ids, np.iinfo(np.int32).max, "filter")
    return f"; the longest prompt has {counts.reduce()['longest_prompt']:,.0f} tokens"
