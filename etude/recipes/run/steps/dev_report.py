"""Shows rollouts for `Trainer.dev`: the text of the turns, the notes, the reward, and the advantages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from etude.protocols import Ids
from etude.recipes.collect.evaluation_player import ADDED_FIELDS
from etude.recipes.collect.failure_messages import describe_failure, endpoint_errors, last_attempt_notes
from etude.recipes.collect.rollouts import StepGroups
from etude.recipes.run.steps.components import RunComponents
from etude.records import Turn
from etude.store import RolloutState

WIDE = 200
"""Most characters shown of a task's field."""
LONGEST = 2000
"""Most characters shown of a note: its end."""


def show_scored(parts: RunComponents, groups: StepGroups, console: Console) -> None:
    """Show rollouts that have a reward, and the advantage of each."""
    learners = parts.learners
    batch = learners.crew.fetch(learners.estimate(learners.annotate(groups.scored, 0), 1))
    advantage = batch.require("advantage")
    rows = batch.rollout_row_offsets.tolist()
    ends = batch.offsets.tolist()
    for position, rollout in enumerate(groups.rollouts):
        fields = parts.store.task(rollout.task).fields
        fields_text = ", ".join(f"{name}={_short(value)}" for name, value in fields.items() if name not in ADDED_FIELDS)
        console.rule(Text(f"task {rollout.task}, try {rollout.id % 2 + 1}", style="bold"))
        console.print(Text(fields_text, style="dim"), soft_wrap=True)
        _show_turns(parts, rollout.id, console)
        _show_notes(parts, parts.store.rollout(rollout.id), console)
        parts_text = ", ".join(f"{name} {value:g}" for name, value in rollout.parts.items())
        console.print(Text(f"reward {rollout.reward:g}{f' ({parts_text})' if parts_text else ''}", style="bold"))
        first, last = rows[position], rows[position + 1]
        for row in range(first, last):
            learned = int(batch.action[ends[row] : ends[row + 1]].sum())
            description = f"{ends[row + 1] - ends[row]} tokens, {learned} of them written by the model"
            console.print(Text(f"row {row - first + 1} of {last - first}: {description}"))
        rollout_tokens = slice(ends[first], ends[last])
        console.print(Text(_describe_update(advantage[rollout_tokens][batch.action[rollout_tokens]].tolist())))


def show_failed(parts: RunComponents, others: Collection[int], console: Console) -> None:
    """Show the attempts that failed, as far as they came, with the cause. others: ids of rollouts that were already
    shown."""
    for state in parts.store.rollouts():
        if state.id in others or state.last is None or state.use != "train":
            continue
        console.rule(Text(f"task {state.task}, try {state.id % 2 + 1}: {state.last.status}", style="bold red"))
        _show_turns(parts, state.id, console)
        _show_notes(parts, state, console, causes=False)
        why = describe_failure(parts.store, state) or "it would train nothing"
        console.print(Text(why, style="red"), soft_wrap=True)


def _show_turns(parts: RunComponents, rollout: int, console: Console) -> None:
    """Show turn by turn the prompt tokens that were new to the model, and its answer."""
    earlier: list[Turn] = []
    for turn in parts.store.turns(rollout):
        num_known, relation = continued_turn(turn.prompt, earlier)
        read_text = f"{len(turn.prompt) - num_known} {'more ' if num_known else ''}tokens read"
        console.print(Text(f"turn {turn.index}: {read_text}{relation}", style="dim"), soft_wrap=True)
        console.print(Text(parts.decode(turn.prompt[num_known:]), style="cyan"), soft_wrap=True)
        console.print(Text(f"{len(turn.completion.ids)} tokens written ({turn.completion.finish_reason})", style="dim"))
        console.print(Text(turn.completion.text, style="green"), soft_wrap=True)
        earlier.append(turn)


def continued_turn(prompt: Ids, earlier: Sequence[Turn]) -> tuple[int, str]:
    """Return how many tokens of a prompt are those of an earlier turn that it continues. Also return a remark about its
    relation to earlier turns, if there is one."""
    sequences = [np.concatenate([turn.prompt, turn.completion.ids]) for turn in earlier]
    continued = [position for position, sequence in enumerate(sequences) if _begins(prompt, sequence)]
    if continued:
        best = max(continued, key=lambda position: len(sequences[position]))
        last = best == len(earlier) - 1
        return len(sequences[best]), "" if last else f", after those of turn {earlier[best].index}"
    rewritten = [turn for turn in earlier if len(prompt) > len(turn.prompt) and _begins(prompt, turn.prompt)]
    if rewritten:
        return 0, f", a new row: after the prompt of turn {rewritten[-1].index} the agent rewrote its history"
    return 0, ", a separate conversation" if earlier else ""


def _begins(ids: Ids, start: Ids) -> bool:
    return len(start) <= len(ids) and np.array_equal(ids[: len(start)], start)


def _show_notes(parts: RunComponents, state: RolloutState, console: Console, *, causes: bool = True) -> None:
    """Show the notes of an attempt. causes: include the endpoint's notes."""
    notes = last_attempt_notes(parts.store, state)
    for note in notes:
        for name, text in _texts(note):
            console.print(Text(f"{name}:", style="dim"))
            console.print(Text(text.strip()[-LONGEST:], style="yellow"), soft_wrap=True)
    for sentence in endpoint_errors(notes) if causes else ():
        console.print(Text(sentence, style="red"), soft_wrap=True)


def _texts(note: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a note under readable names: each output of a command, or the data that an agent emitted."""
    name, data = note["name"], note["data"]
    if endpoint_errors([note]):
        return []
    if name == "output" and isinstance(data, Mapping):
        streams = {"standard output": data.get("stdout"), "standard error": data.get("stderr")}
        return [(stream, str(text)) for stream, text in streams.items() if text]
    return [(name, json.dumps(data, ensure_ascii=False, default=str))]


def _describe_update(advantages: Sequence[float]) -> str:
    """Describe the effect of an update on a rollout."""
    if not advantages:
        return "it would train nothing: the model wrote nothing"
    mean = sum(advantages) / len(advantages)
    if not any(advantages):
        return "it would train nothing: all attempts at this task have the same reward"
    return f"advantage {mean:+.3g}: what it wrote would become {'more likely' if mean > 0 else 'less likely'}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= WIDE else text[:WIDE] + "…"
