"""A run's journal, read rollout by rollout, while it may be written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from etude.chat import Tokenizer
from etude.errors import ConfigError
from etude.recipes.collect.agent_rollouts import FIRST_EVALUATION_ORDINAL, effective_reward
from etude.recipes.run.directory import OPTIONS, read_options
from etude.records import Turn
from etude.store import (
    AttemptEnded,
    AttemptStarted,
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

__all__ = [
    "AttemptRecord",
    "RewardGetter",
    "RolloutRecord",
    "Split",
    "load_tokenizer",
    "open_journal",
    "read_rollouts",
    "read_settled_groups",
    "reward_getter",
]

JOURNAL = "journal.sqlite"
Split = str
"""`train`, `val` or `all`."""
RewardGetter: TypeAlias = Callable[[RolloutState], float | None]


@dataclass
class AttemptRecord:
    """What happened in one attempt."""

    turns: list[Turn] = field(default_factory=list)
    """In order, each with what it was paid."""
    times: list[float] = field(default_factory=list)
    """When each was written down."""
    notes: list[NoteRecorded] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class RolloutRecord:
    """A rollout, its task, and all that happened in it."""

    state: RolloutState
    task: TaskState
    attempts: list[AttemptRecord]
    reward: float | None
    """What it counted for, once it is judged; None for nothing."""

    @property
    def turns(self) -> list[Turn]:
        """Those of the attempt that counts."""
        return self.attempts[-1].turns if self.attempts else []


@contextmanager
def open_journal(directory: Path) -> Iterator[Journal]:
    """The journal of a run."""
    file = directory / JOURNAL
    if not file.is_file():
        raise ConfigError(
            f"{directory} holds no {JOURNAL}, so no rollouts of a run. Give the directory that `etude train` printed."
        )
    with closing(open_store(file, read_only=True)) as store:
        yield store


def load_tokenizer(directory: Path, model: Path | None) -> Tokenizer:
    """The tokenizer that a run's ids are of: in a directory that was named, or where the run found it."""
    if model is not None:
        return Tokenizer.load(model)
    options = read_options(directory)["model"]
    try:
        return Tokenizer.load(Path(options["tokenizer"] or options["path"]))
    except ConfigError as error:
        raise ConfigError(
            f"The tokenizer of {directory} cannot be read. {error} Say where it is now: --model."
        ) from error


def reward_getter(directory: Path) -> RewardGetter:
    """What the rollouts of a run counted for: all that each earned, or what the failure of an agent did."""
    options = read_options(directory) if (directory / OPTIONS).exists() else {}
    agent = options.get("agent", {})
    if agent.get("path") is None:
        return lambda state: None if state.last is None else state.last.total
    return partial(effective_reward, failed_reward=agent["failed_reward"])


def read_rollouts(store: Journal, split: Split, reward_of: RewardGetter) -> Iterator[RolloutRecord]:
    """Every rollout of a split, by id."""
    for state in store.iter_states(RolloutState):
        if split in ("all", state.use):
            yield _read_rollout(store, state, reward_of)


def read_settled_groups(store: Journal, reward_of: RewardGetter) -> Iterator[list[RolloutRecord]]:
    """The tries at each task that a step trained on or left out: whole groups, to which nothing is added any more.
    Tasks that scored the model are none of them."""
    for task in store.iter_states(TaskState):
        if task.phase is not Phase.OPEN and task.id < FIRST_EVALUATION_ORDINAL:
            states = store.load_states(RolloutState, task.rollouts)
            yield [_read_rollout(store, states[id], reward_of) for id in sorted(states)]


def _read_rollout(store: Journal, state: RolloutState, reward_of: RewardGetter) -> RolloutRecord:
    """What happened in a rollout up to now; what is written of it while it is read may be left out."""
    attempts = [AttemptRecord() for _ in state.attempts]
    rewards: defaultdict[tuple[int, int], float] = defaultdict(float)
    for _, event in store.read(rollout=state.id):
        if isinstance(event, RolloutCancelled) or getattr(event, "attempt", -1) not in range(len(attempts)):
            continue
        match event:
            case AttemptStarted(attempt=attempt, at=at):
                attempts[attempt].began = attempts[attempt].ended = at
            case TurnRecorded(attempt=attempt, turn=turn, at=at):
                attempts[attempt].turns.append(turn)
                attempts[attempt].times.append(at)
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
    return RolloutRecord(state, store.task(state.task), attempts, reward_of(state))


def task_columns(task: TaskState) -> dict[str, Any]:
    """A task, as files tell of it."""
    return {"task": task.id, "row": task.row, "data_source": task.source}
