"""What is asked at a desk, held against what is written: whether it is there, was asked before, and in which words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from etude.errors import DataError, IllegalMoveError, RewardError, UnknownError
from etude.records import Task
from etude.store.desk import Key, Wanted
from etude.store.events import Event, Rewarded, TaskIssued
from etude.store.journal import Writing
from etude.store.limits import Limits
from etude.store.plain import plain
from etude.store.states import AttemptState, RolloutState, Status, TaskState

__all__ = [
    "asked_before",
    "attempt_of",
    "earned",
    "issue",
    "limits_of",
    "other_words",
    "reason",
    "retries_of",
    "rollout_of",
    "said_before",
    "same_task",
    "unsealed",
    "why_over",
]


LARGEST = 1e100
"""Of rewards: however many of them are added up, the sum is a number."""


def earned(reward: Any, key: Key, turn: int | None = None) -> tuple[float, dict[str, float]]:
    """A reward as a number and its parts."""
    where = f"Attempt {key.attempt} of rollout {key.rollout}: its reward" + ("" if turn is None else f" of turn {turn}")
    try:
        parts = {str(name): float(value) for name, value in reward.items()} if isinstance(reward, Mapping) else {}
        total = sum(parts.values()) if isinstance(reward, Mapping) else float(reward)
    except OverflowError as error:
        raise RewardError(f"{where} is beyond ±{LARGEST:g}: what is so large cannot be added up.") from error
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where} is {reward!r}; it must be a number, or numbers by name.") from error
    if isinstance(reward, Mapping) and not parts:
        raise RewardError(f"{where} has no parts: give a number, or at least one named part.")
    if any(math.isfinite(value) and abs(value) > LARGEST for value in (total, *parts.values())):
        raise RewardError(f"{where} is {reward!r}, beyond ±{LARGEST:g}: what is so large cannot be added up.")
    return total, parts


def said_before(attempt: AttemptState, event: Rewarded) -> bool:
    """Whether its final reward was given in the same words: by who did not hear that it was written."""
    said = attempt.reward, dict(attempt.parts or {}), attempt.truncated, attempt.role
    return said == (event.reward, dict(event.parts), event.truncated, event.role)


def attempt_of(writing: Writing, key: Key) -> AttemptState:
    """An attempt that was started."""
    attempts = rollout_of(writing, key.rollout).attempts
    if not 0 <= key.attempt < len(attempts):
        raise UnknownError(f"Rollout {key.rollout} has {len(attempts)} attempts, and no attempt {key.attempt}.")
    return attempts[key.attempt]


def rollout_of(writing: Writing, id: int) -> RolloutState:
    """A rollout that was queued."""
    state = writing.state(RolloutState, id)
    if state is None:
        raise UnknownError(f"The desk has no rollout {id}.")
    return state


def unsealed(writing: Writing, key: Key) -> None:
    """That more may be earned."""
    if rollout_of(writing, key.rollout).sealed:
        raise IllegalMoveError(
            f"Rollout {key.rollout} was read by the run that wanted it, and earns nothing more: this reward came too "
            "late. Give it before the attempt ends."
        )


def reason(why: str) -> str:
    """Why something is not wanted any more."""
    if not why.strip():
        raise DataError(
            "Say why these rollouts are cancelled: it is what their runners are told, and what is read later."
        )
    return why


def limits_of(state: RolloutState) -> Limits:
    """What it is held to; the usual, where whoever queued it did not say."""
    return state.limits or Limits()


def retries_of(state: RolloutState) -> int:
    """How often it was queued again."""
    last = state.last
    queued = state.status is Status.QUEUED or (bool(state.why) and last is not None and not last.watched)
    return max(0, len(state.attempts) - (not queued))


def why_over(writing: Writing, key: Key) -> str:
    """Why a runner is to stop what it has no lease of."""
    state = writing.state(RolloutState, key.rollout)
    if state is None or not 0 <= key.attempt < len(state.attempts):
        return "Nobody here knows of it."
    attempt = state.attempts[key.attempt]
    return attempt.error or f"It is over: {attempt.status}."


def issue(writing: Writing, task: Task) -> list[Event]:
    """What makes a task one of the run; nothing, if it was issued before in the same words."""
    row = task.fields.get("row")
    issued = TaskIssued(task.ordinal, row if isinstance(row, int) else task.ordinal, task.source, task.fields)
    known = writing.state(TaskState, task.ordinal)
    if known is None:
        return [issued]
    if not same_task(known.task, Task(task.ordinal, issued.fields, task.source)):
        raise other_words(f"Task {task.ordinal}", "issued")
    return []


def asked_before(writing: Writing, new: Mapping[int, Wanted], id: int, one: Wanted) -> bool:
    """Whether a rollout of this id was asked for before, in the same words."""
    words = (one.task.ordinal, one.sample, one.use, one.limits)
    if id in new:
        before = new[id]
        said = (before.task.ordinal, before.sample, before.use, before.limits)
    else:
        state = writing.state(RolloutState, id)
        if state is None:
            return False
        said = (state.task, state.sample, state.use, limits_of(state))
    if said != words:
        raise other_words(f"Rollout {id}", "queued")
    return True


def same_task(left: Task, right: Task) -> bool:
    """Whether two tasks ask the same; as text, since a number that is none is not equal to itself."""
    if left.source != right.source:
        return False
    return left.fields == right.fields or json.dumps(plain(left.fields, "")) == json.dumps(plain(right.fields, ""))


def other_words(what: str, done: str) -> IllegalMoveError:
    """The refusal of what was asked before, and differently."""
    return IllegalMoveError(
        f"{what} was {done} before in other words, and what was {done} is never changed: give it another number, or "
        "the very same content."
    )
