"""One step: its groups and its rollouts, those that it trained on and those that it did not, each with the reason."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.errors import NotFoundError
from etude.records import has_zero_variance
from etude.store import Phase, RolloutState, Status, TaskState
from etude.tools.rollout_reader import read_first_prompt
from etude.tools.step_index import AdmittedStep
from etude.view.images import split_images
from etude.view.queries.replay import StepReplays, step_replays
from etude.view.replies import Table
from etude.view.run_reader import RunReader

PROMPT_TOKENS = 512
"""Tokens at the end of a prompt that are read for a table."""
LONGEST_TEXT = 240
"""Characters of a prompt or an answer in a table."""


@dataclass(frozen=True)
class StepPage:
    """The page of one step."""

    step: int
    steps: list[int]
    """The step before and the step after, where they exist."""
    version: int | None
    """The trainer's policy version; None for a step that trained on nothing."""
    metrics: dict[str, float]
    groups: Table
    rollouts: Table
    replays: StepReplays | None
    """The replays of the step; None if it trained on nothing."""


@dataclass(frozen=True)
class RolloutRow:
    """One rollout in a table."""

    state: RolloutState
    reward: float | None
    in_batch: bool
    why: str
    """The reason for which it is not in the batch; empty if it is."""
    turns: int
    prompt_tokens: int
    tokens: int
    """Tokens that the policy sampled."""
    oldest: int | None
    """The oldest policy version that sampled a token."""
    staleness: int | None
    advantage: float | None
    """The mean advantage of its tokens, once a step has trained on it."""
    answer: str
    """The beginning of the last answer."""


def read_step(reader: RunReader, step: int) -> StepPage:
    """Return the page of a step."""
    index = reader.index
    steps = index.steps
    if step not in steps:
        found = f"steps {steps[0]} to {steps[-1]}" if steps else "no step yet"
        raise NotFoundError(f"The run '{reader.name}' has no step {step}; its journal has {found}.")
    admitted = index.get(step)
    tasks, states = step_rollouts(reader, step)
    rollouts = [states[id] for task in tasks.values() for id in task.rollouts]
    rows = rollout_rows(reader, rollouts, tasks, admitted, whole=True)
    position = steps.index(step)
    return StepPage(
        step,
        [*steps[max(0, position - 1) : position], *steps[position + 1 : position + 2]],
        None if admitted is None else admitted.version,
        _metrics_of(reader, step),
        group_table(rows, list(tasks.values()), first_prompts(reader, rows, tasks)),
        rollout_table(rows),
        None if admitted is None else step_replays(reader, step),
    )


def step_rollouts(reader: RunReader, step: int) -> tuple[dict[int, TaskState], dict[int, RolloutState]]:
    """Return the tasks that a step trained on or dropped, in their order, and the states of all their rollouts."""
    index = reader.index
    admitted = index.get(step)
    trained = [] if admitted is None else admitted.rollouts.tolist()
    states = reader.journal.load_states(RolloutState, trained)
    order = dict.fromkeys([*(states[id].task for id in trained if id in states), *index.dropped(step)])
    tasks = reader.journal.load_states(TaskState, list(order))
    others = [id for task in tasks.values() for id in task.rollouts if id not in states]
    return {id: tasks[id] for id in order}, states | reader.journal.load_states(RolloutState, others)


def rollout_rows(
    reader: RunReader,
    states: Sequence[RolloutState],
    tasks: Mapping[int, TaskState],
    admitted: AdmittedStep | None,
    *,
    whole: bool = False,
) -> list[RolloutRow]:
    """Return the rows of rollouts. tasks: their tasks. admitted: the step that trained on them. whole: with advantages
    and answers."""
    shapes = reader.journal.turn_shapes([state.id for state in states])
    advantages = reader.index.advantages(admitted.step) if whole and admitted is not None else {}
    answers = _answer_beginnings(reader, states) if whole else {}
    rows = []
    for state, reward in zip(states, reader.rewards([*states]), strict=True):
        turns = shapes[state.id]
        versions = [turn.first_version for turn in turns if turn.first_version is not None]
        oldest = min(versions, default=None)
        in_batch = state.phase is Phase.ADMITTED
        staleness = admitted.version - oldest if in_batch and admitted is not None and oldest is not None else None
        rows.append(
            RolloutRow(
                state,
                reward,
                in_batch,
                explain_absence(state, tasks[state.task]),
                len(turns),
                turns[0].prompt if turns else 0,
                sum(turn.tokens for turn in turns),
                oldest,
                staleness,
                advantages.get(state.id),
                answers.get(state.id, ""),
            )
        )
    return rows


def _answer_beginnings(reader: RunReader, states: Sequence[RolloutState]) -> dict[int, str]:
    """Return the beginning of the last answer of each rollout's last attempt."""
    found = {}
    bodies = reader.journal.turn_bodies([state.id for state in states])
    for state in states:
        last = json.loads(bodies[state.id][-1]) if bodies[state.id] else None
        if last is not None and last["attempt"] == len(state.attempts) - 1:
            found[state.id] = _shorten(last["completion"]["text"])
    return found


def explain_absence(state: RolloutState, task: TaskState) -> str:
    """Return the reason for which no step trains on a rollout; empty if a step does."""
    error = state.why or (state.last.error if state.last is not None else "")
    match state.phase:
        case Phase.ADMITTED:
            return ""
        case Phase.QUEUED:
            return "It waits in the queue."
        case Phase.RUNNING:
            return "It is not finished."
        case Phase.FINISHED if state.use == "train":
            return "It is finished, and waits for the others of its group and for its step."
    if state.use == "val":
        return "It was sampled to score the policy, and no step trains on it."
    if state.status is not Status.SUCCEEDED:
        return f"It ended as {state.status}{f': {error}' if error else '.'}"
    if task.phase is Phase.DROPPED:
        return f"Step {task.step} dropped its group: {task.cause}."
    return f"Step {task.step} trained on other rollouts of its group."


def _metrics_of(reader: RunReader, step: int) -> dict[str, float]:
    metrics = reader.metrics
    if step not in metrics.steps:
        return {}
    position = metrics.steps.index(step)
    found = ((name, float(metrics.values(name)[position])) for name in metrics.names if name != "time")
    return {name: value for name, value in found if value == value}


def first_prompts(reader: RunReader, rows: Sequence[RolloutRow], tasks: Mapping[int, TaskState]) -> dict[int, str]:
    """Return the last message before the first answer to each task, shortened."""
    prompts = reader.prompts
    begun = {row.state.task: row.state.id for row in reversed(rows) if row.turns}
    turns = {} if prompts is None else reader.journal.first_turns([*begun.values()])
    found = {}
    for task in tasks.values():
        first = [turns[id] for id in (begun.get(task.id),) if id in turns]
        messages = read_first_prompt(prompts, first, split_images(task)[0].get("prompt"), tail=PROMPT_TOKENS)
        found[task.id] = _shorten(messages[-1]["text"]) if messages else ""
    return found


def group_table(rows: Sequence[RolloutRow], tasks: Sequence[TaskState], prompts: Mapping[int, str]) -> Table:
    """Return a row for each task, with the rewards of its rollouts. `zero_variance`: the group teaches nothing.

    prompts: the prompts that are shown, by task.
    """
    by_task: dict[int, list[RolloutRow]] = defaultdict(list)
    for row in rows:
        by_task[row.state.task].append(row)
    columns: dict[str, list[Any]] = defaultdict(list)
    for task in tasks:
        group = by_task[task.id]
        rewards = [row.reward for row in group if row.reward is not None]
        low, high = min(rewards, default=None), max(rewards, default=None)
        tokens = [row.tokens for row in group]
        values = {
            "task": task.id,
            "row": task.row,
            "source": task.source,
            "prompt": prompts.get(task.id, ""),
            "rollouts": len(group),
            "in_batch": sum(row.in_batch for row in group),
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "low": low,
            "high": high,
            "zero_variance": len(rewards) > 1 and bool(has_zero_variance(low, high)),
            "failed": sum(row.state.status is not Status.SUCCEEDED for row in group),
            "tokens": sum(tokens),
            "mean_tokens": sum(tokens) / len(tokens) if tokens else None,
            "fewest_tokens": min(tokens, default=None),
            "most_tokens": max(tokens, default=None),
            "dropped": task.cause,
        }
        for name, value in values.items():
            columns[name].append(value)
    return Table(columns)


def rollout_table(rows: Sequence[RolloutRow]) -> Table:
    """Return a row for each rollout, with a column for each part of the reward."""
    parts = dict.fromkeys(name for row in rows if row.state.last is not None for name in row.state.last.parts)
    columns: dict[str, list[Any]] = {
        "rollout": [row.state.id for row in rows],
        "task": [row.state.task for row in rows],
        "sample": [row.state.sample for row in rows],
        "status": [str(row.state.status) for row in rows],
        "in_batch": [row.in_batch for row in rows],
        "answer": [row.answer for row in rows],
        "reward": [row.reward for row in rows],
        "advantage": [row.advantage for row in rows],
        **{f"reward/{part}": [_part(row.state, part) for row in rows] for part in parts},
        "turns": [row.turns for row in rows],
        "prompt_tokens": [row.prompt_tokens for row in rows],
        "tokens": [row.tokens for row in rows],
        "truncated": [row.state.last is not None and row.state.last.truncated for row in rows],
        "attempts": [len(row.state.attempts) for row in rows],
        "oldest_version": [row.oldest for row in rows],
        "staleness": [row.staleness for row in rows],
        "why": [row.why for row in rows],
    }
    return Table(columns)


def _part(state: RolloutState, name: str) -> float | None:
    return None if state.last is None else state.last.parts.get(name)


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
