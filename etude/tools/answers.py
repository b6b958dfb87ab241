"""`etude answers RUN`: what a run was trained on, to be read: the tasks of a step, and what was answered to each.

The answers come from the run's journal, which may be read while the run goes on. What a rollout of several turns was
shown between them is read from the very tokens it was shown. Answers to the held-out tasks lie beside it as text, in
`evaluations/`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.chat import Tokenizer, retold
from etude.errors import ConfigError
from etude.observe import format_number, get_log, make_console
from etude.recipes.agents import asked_of
from etude.recipes.folder import read_options
from etude.records import Turn
from etude.store import Journal, open_store
from etude.tools.rollouts.reading import Counts, counting

__all__ = ["answers", "show"]

JOURNAL = "journal.sqlite"
LONGEST = 300
"""Characters of an answer that are shown, unless it is to be whole."""


def show(
    directory: Path,
    *,
    step: int | None = None,
    tasks: int | None = None,
    whole: bool = False,
    console: Console | None = None,
) -> None:
    """Show what a step was trained on, by default the last one: some of its tasks, the best answers first."""
    shown = 3 if tasks is None else _at_least_one(tasks)
    step, found = answers(directory, step)
    console = make_console() if console is None else console
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for each in found:
        groups[each["task"]].append(each)
    console.print(Text(f"Step {step}: {len(found)} answers to {len(groups)} tasks."), soft_wrap=True)
    for group in list(groups.values())[:shown]:
        console.print()
        console.print(Text(_spoken(group[0]["prompt"]), "bold"), soft_wrap=True)
        console.print(_table(sorted(group, key=lambda each: -each["reward"]), whole))
    if len(groups) > shown:
        console.print(Text(f"{len(groups) - shown} more tasks: -n {len(groups)} shows all, --json prints them."))


def _at_least_one(tasks: int) -> int:
    if tasks < 1:
        raise ConfigError(f"-n {tasks} asks for no task. Ask for 1 or more.")
    return tasks


def answers(directory: Path, step: int | None = None, tasks: int | None = None) -> tuple[int, list[dict[str, Any]]]:
    """Which step, by default the last that was collected, and its answers as plain data, task by task. tasks: how many
    of its tasks; None is all."""
    most = None if tasks is None else _at_least_one(tasks)
    file = directory / JOURNAL
    if not file.is_file():
        raise ConfigError(
            f"{directory} holds no {JOURNAL}, so no answers of a run. Give the directory that `etude train` printed."
        )
    with closing(open_store(file, read_only=True)) as store:
        admitted = store.admitted()
        if not admitted:
            raise ConfigError(f"The run in {directory} has not collected its first step yet. Wait until it has.")
        wanted = max(admitted) if step is None else step
        if wanted not in admitted:
            raise ConfigError(
                f"The run in {directory} has no step {wanted}; it has collected steps {min(admitted)} to "
                f"{max(admitted)}. Give one of them with --step."
            )
        counts = counting(directory)
        found = list(_of(store, wanted, admitted[wanted], counts, partial(_tokenizer, directory)))
        first = list(dict.fromkeys(each["task"] for each in found))[:most]
        return wanted, [each for each in found if each["task"] in first]


@cache
def _tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a run, where it still lies where the run found it."""
    model = read_options(directory)["model"]
    try:
        return Tokenizer.load(Path(model["tokenizer"] or model["path"]))
    except ConfigError as error:
        get_log("tools").warning("What was shown between answers cannot be read, and is left out. %s", error)
        return None


def _of(
    store: Journal, step: int, rollouts: Sequence[int], counts: Counts, speaks: Callable[[], Tokenizer | None]
) -> Iterator[dict[str, Any]]:
    for id in rollouts:
        rollout = store.rollout(id)
        task, last, turns = store.task(rollout.task), rollout.last, store.turns(id)
        assert last is not None, "what a step trained on was tried"
        yield {
            "step": step,
            "task": task.id,
            "source": task.source,
            "prompt": asked_of(task.fields),
            "ground_truth": task.fields.get("ground_truth"),
            "answer": turns[-1].completion.text if turns else "",
            "reward": counts(rollout),
            "parts": dict(last.parts) if counts(rollout) == last.total else {},
            "tokens": sum(len(turn.completion.ids) for turn in turns),
            "finish": "length" if last.truncated else turns[-1].completion.finish if turns else "stop",
        } | ({"conversation": _conversation(speaks(), turns)} if len(turns) > 1 else {})


def _conversation(tokenizer: Tokenizer | None, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """What was said, and what a turn earned by itself."""
    told: list[dict[str, Any]]
    if tokenizer is None:
        told = [{"by": "model", "text": turn.completion.text} for turn in turns]
    else:
        told = [*retold(tokenizer, turns)]
    for said, turn in zip((each for each in told if each["by"] == "model"), turns, strict=True):
        if turn.reward is not None:
            said["reward"] = turn.reward
    return told


def _table(group: Sequence[Mapping[str, Any]], whole: bool) -> Table:
    """A row for each answer; those that say the same and earned the same share one."""
    parts = list(dict.fromkeys(name for each in group for name in each["parts"]))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("times", "reward", *parts, "tokens"):
        table.add_column(name, justify="right")
    table.add_column("answer")
    alike: dict[tuple[str, float, str], list[Mapping[str, Any]]] = defaultdict(list)
    for each in group:
        alike[_told(each), each["reward"], each["finish"]].append(each)
    for (told, _, _), (each, *others) in alike.items():
        text = told if whole or len(told) <= LONGEST else told[: LONGEST - 1] + "…"
        cut = "" if each["finish"] == "stop" else f"  [{each['finish']}]"
        numbers = [each["reward"], *(each["parts"].get(name, float("nan")) for name in parts)]
        cells = [str(1 + len(others)), *map(format_number, numbers), str(each["tokens"])]
        table.add_row(*map(Text, cells), Text.assemble(text, (cut, "dim")))
    return table


def _told(answer: Mapping[str, Any]) -> str:
    """What was answered; of several turns, each and what it earned, and behind a bar what came of it."""
    if "conversation" not in answer:
        return str(answer["answer"])
    return "\n".join(
        each["text"] + (f"  [earned {format_number(each['reward'])}]" if "reward" in each else "")
        if each["by"] == "model"
        else "\n".join(f"│ {line}" for line in each["text"].strip().splitlines())
        for each in answer["conversation"]
    )


def _spoken(prompt: Any) -> str:
    """A prompt as a person reads it."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        said = {name: each if isinstance(each, str) else json.dumps(each) for name, each in prompt.items()}
        return "\n".join(f"{name}: {text}" for name, text in said.items())
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)
