"""Reader of a run's journal, rollout by rollout; the run may write to it at the same time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etude.chat import ChatRenderer, PromptReader, Tokenizer
from etude.chat.prompt_reader import PROMPT, spans_after
from etude.errors import ConfigError
from etude.images.addresses import find_address
from etude.recipes.collect.rollout_ends import effective_reward
from etude.recipes.run.directory import JOURNAL, OPTIONS, read_options
from etude.records import Outcome, Turn
from etude.store import (
    AttemptEnded,
    AttemptStarted,
    Event,
    Journal,
    NoteRecorded,
    Phase,
    RolloutCancelled,
    RolloutState,
    TaskState,
    TurnRecorded,
    TurnRewarded,
    open_store,
)

PAGE_ROLLOUTS, PAGE_GROUPS = 64, 16
"""Rollouts and groups that are read by the same queries."""
FAILURES = tuple(outcome.value for outcome in Outcome if outcome is not Outcome.SUCCEEDED)
TASK_PROMPT = "prompt of the task"
"""The role of a prompt that is read from the task, since what the model saw is not known."""
Split: TypeAlias = Literal["train", "val", "all"]
RewardGetter: TypeAlias = Callable[[RolloutState], float | None]


@dataclass
class AttemptRecord:
    """The recorded events of one attempt."""

    turns: list[Turn] = field(default_factory=list)
    """The turns in order, each with its reward."""
    times: list[float] = field(default_factory=list)
    """The time at which each turn ended or was recorded."""
    starts: list[float] = field(default_factory=list)
    """The time at which the sampling of each turn began; 0 is unknown."""
    notes: list[NoteRecorded] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class RolloutRecord:
    """A rollout, its task, and its attempts."""

    state: RolloutState
    task: TaskState
    attempts: list[AttemptRecord]
    reward: float | None
    """The reward that training used; None if there is none."""

    @property
    def turns(self) -> list[Turn]:
        """The turns of the last attempt, the one that counts."""
        return self.attempts[-1].turns if self.attempts else []


@contextmanager
def open_journal(directory: Path) -> Iterator[Journal]:
    """Open the journal of a run for reading."""
    file = directory / JOURNAL
    if not directory.exists():
        raise ConfigError(
            f"There is no directory {directory} (seen from {Path.cwd()}). Give the one that `etude train` printed."
        )
    if not file.is_file():
        raise ConfigError(
            f"{directory} has no {JOURNAL}, so it has no rollouts. Give the directory that `etude train` printed."
        )
    with closing(open_store(file, read_only=True)) as store:
        yield store


def load_tokenizer(directory: Path, model: Path | None) -> Tokenizer:
    """Load the tokenizer of a run's ids, from `model` or from the run's own path."""
    if model is not None:
        return Tokenizer.load(model)
    options = read_options(directory)["model"]
    try:
        return Tokenizer.load(Path(options["tokenizer"] or options["path"]))
    except ConfigError as error:
        raise ConfigError(
            f"The tokenizer of {directory} cannot be read. {error} Name its directory with --model."
        ) from error


def make_prompt_reader(tokenizer: Tokenizer, options: Mapping[str, Any]) -> PromptReader:
    """Return the reader of a run's recorded prompts. options: the run's."""
    chat = options.get("chat") or {}
    file = chat.get("template")
    template = Path(file).read_text(encoding="utf-8") if file is not None and Path(file).is_file() else None
    return PromptReader(
        ChatRenderer(
            tokenizer,
            chat.get("history", "served"),
            template=template,
            template_kwargs=chat.get("template_kwargs"),
        )
    )


def read_first_prompt(
    prompts: PromptReader | None, turns: Sequence[Turn], task: Any, tail: int | None = None
) -> list[dict[str, str]]:
    """Return the messages that the model saw first, by role. tail: read the last tokens of the prompt alone.

    Without a turn, or without a tokenizer, the result is the prompt of the task, named so. It is empty for a task
    without one. task: the prompt of the task, or None.
    """
    if prompts is not None and turns:
        prompt = turns[0].prompt
        start = 0 if tail is None else max(0, len(prompt) - tail)
        return prompts.read_prompt(prompt[start:], spans_after(turns[0].images, start))
    return [] if task is None else [{"by": TASK_PROMPT, "text": prompt_text(task)}]


def messages_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Return messages as text, each after its role; a text without roles stands alone."""
    return "\n".join(
        message["text"] if message["by"] in (PROMPT, TASK_PROMPT) else f"{message['by']}: {message['text']}"
        for message in messages
    )


def reward_getter(directory: Path) -> RewardGetter:
    """Return the function that gives the reward of a run's rollout."""
    return reward_of_options(read_options(directory) if (directory / OPTIONS).exists() else {})


def reward_of_options(options: Mapping[str, Any]) -> RewardGetter:
    """Return the function that gives a rollout's reward: its total, or the reward of a failed agent."""
    return partial(effective_reward, failed_reward=options.get("agent", {}).get("failed_reward", "drop"))


def read_rollouts(store: Journal, split: Split, reward_of: RewardGetter) -> Iterator[RolloutRecord]:
    """Iterate over the rollouts of a split, by id."""
    states = store.iter_states(RolloutState, use=None if split == "all" else split)
    while page := list(islice(states, PAGE_ROLLOUTS)):
        yield from read_records(store, page, _load_tasks(store, page), reward_of)


def read_settled_groups(store: Journal, reward_of: RewardGetter) -> Iterator[list[RolloutRecord]]:
    """Iterate over the complete groups of rollouts, one for each task that a step trained on or dropped.

    Evaluation tasks are not included.
    """
    settled = (task for task in store.iter_states(TaskState, use="train") if task.phase is not Phase.OPEN)
    while page := list(islice(settled, PAGE_GROUPS)):
        states = store.load_states(RolloutState, [id for task in page for id in task.rollouts])
        groups = [[states[id] for id in sorted(task.rollouts) if id in states] for task in page]
        tasks = {task.id: task for task in page}
        records = read_records(store, [state for group in groups for state in group], tasks, reward_of)
        for group in groups:
            yield list(islice(records, len(group)))


def read_step_rollouts(store: Journal, trained: Sequence[int], dropped: Sequence[int]) -> list[RolloutState]:
    """Return the rollouts that a step trained on, each task's followed by its failed ones.

    trained: their ids. dropped: the tasks that the step dropped, whose failed rollouts come last.
    """
    states = store.load_states(RolloutState, trained)
    by_task: dict[int, list[RolloutState]] = {task: [] for task in [*(states[id].task for id in trained), *dropped]}
    for id in trained:
        by_task[states[id].task].append(states[id])
    tasks = store.load_states(TaskState, list(by_task))
    others = [id for task in tasks.values() for id in task.rollouts if id not in states]
    for state in store.load_states(RolloutState, sorted(others)).values():
        if has_failed(state):
            by_task[state.task].append(state)
    return [state for group in by_task.values() for state in group]


def has_failed(state: RolloutState) -> bool:
    """Return True if a rollout has ended without success."""
    return state.phase not in (Phase.QUEUED, Phase.RUNNING) and state.status in FAILURES


def read_rollout(store: Journal, state: RolloutState, reward_of: RewardGetter) -> RolloutRecord:
    """Read the events of a rollout so far; events that are written during the read may be missing."""
    return next(read_records(store, [state], _load_tasks(store, [state]), reward_of))


def _load_tasks(store: Journal, states: Sequence[RolloutState]) -> dict[int, TaskState]:
    return store.load_states(TaskState, list({state.task for state in states}))


def read_records(
    store: Journal, states: Sequence[RolloutState], tasks: Mapping[int, TaskState], reward_of: RewardGetter
) -> Iterator[RolloutRecord]:
    """Iterate over the records of these rollouts, in their order, by a few queries. tasks: theirs, by ordinal."""
    for state, events in zip(states, store.read_rollouts([state.id for state in states]), strict=True):
        yield _record(state, tasks[state.task], events, reward_of(state))


def _record(
    state: RolloutState, task: TaskState, events: Sequence[Event], trained_reward: float | None
) -> RolloutRecord:
    """Sort the events of a rollout by attempt. trained_reward: the reward that training used."""
    attempts = [AttemptRecord() for _ in state.attempts]
    rewards: defaultdict[tuple[int, int], float] = defaultdict(float)
    for event in events:
        if isinstance(event, RolloutCancelled) or getattr(event, "attempt", -1) not in range(len(attempts)):
            continue
        match event:
            case AttemptStarted(attempt=attempt, at=at):
                attempts[attempt].began = attempts[attempt].ended = at
            case TurnRecorded(attempt=attempt, turn=turn, at=at, began=began):
                attempts[attempt].turns.append(turn)
                attempts[attempt].times.append(at)
                attempts[attempt].starts.append(began)
            case TurnRewarded(attempt=attempt, turn=index, reward=reward):
                rewards[attempt, index] += reward
            case NoteRecorded(attempt=attempt):
                attempts[attempt].notes.append(event)
            case AttemptEnded(attempt=attempt, at=at):
                attempts[attempt].ended = at
    for (attempt, index), reward in rewards.items():
        turns = attempts[attempt].turns
        turns[index] = replace(turns[index], reward=(turns[index].reward or 0.0) + reward)
    for record in attempts:
        record.ended = max(record.ended, record.began, *record.times)
    return RolloutRecord(state, task, attempts, trained_reward)


def task_columns(task: TaskState) -> dict[str, Any]:
    """Return the columns of a task."""
    return {"task": task.id, "row": task.row, "data_source": task.source}


def prompt_text(prompt: Any) -> str:
    """Return a prompt as readable text."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        fields = {name: value if isinstance(value, str) else json.dumps(value) for name, value in prompt.items()}
        return "\n".join(f"{name}: {text}" for name, text in fields.items())
    return "\n".join(f"{message['role']}: {_content_text(message.get('content'))}" for message in prompt)


def _content_text(content: Any) -> str:
    return " ".join(map(_part_text, content)) if isinstance(content, list) else str(content or "")


def _part_text(part: Any) -> str:
    """Return a part of a message as text. One that is not text stands in brackets: an image with its size, an address,
    or its kind."""
    match part:
        case {"text": str(text)}:
            return text
        case {"url": str(url)} | {"image_url": {"url": str(url)} | str(url)}:
            image = find_address(url)
            return f"[{url[:80]}]" if image is None else f"[picture {image.width}x{image.height}]"
        case {"type": str(kind)}:
            return f"[{kind}]"
    return json.dumps(part)
