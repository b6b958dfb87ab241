"""Checks of requests to a rollout queue against the recorded state: whether an object exists, and whether a repeated
request has the same content."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from etude.errors import IllegalTransitionError, NotFoundError, RewardError
from etude.records import Task
from etude.store.journal.events import AttemptRewarded, Event, RolloutQueued, TaskIssued
from etude.store.journal.journal import Transaction
from etude.store.journal.json_values import to_json_value
from etude.store.journal.states import AttemptState, RolloutState, Status, TaskState
from etude.store.queue.owner_lease import OWNER_RESOURCE
from etude.store.queue.records import AttemptId, RolloutRequest
from etude.store.queue.rollout_limits import RolloutLimits, RolloutPurpose

LARGEST = 1e100
"""Largest magnitude of a reward, so that a sum of many stays finite."""


def parse_reward(reward: Any, key: AttemptId, turn: int | None = None) -> tuple[float, dict[str, float]]:
    """Return a reward as its total and its parts."""
    where = f"Attempt {key.attempt} of rollout {key.rollout}: its reward" + ("" if turn is None else f" of turn {turn}")
    try:
        parts = {str(name): float(value) for name, value in reward.items()} if isinstance(reward, Mapping) else {}
        total = sum(parts.values()) if isinstance(reward, Mapping) else float(reward)
    except OverflowError as error:
        raise RewardError(f"{where} is beyond ±{LARGEST:g}, so it cannot be added up.") from error
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where} is {reward!r}; it must be a number, or a mapping of names to numbers.") from error
    if isinstance(reward, Mapping) and not parts:
        raise RewardError(f"{where} has no parts. Give a number, or at least one named part.")
    if any(math.isfinite(value) and abs(value) > LARGEST for value in (total, *parts.values())):
        raise RewardError(f"{where} is {reward!r}, which is beyond ±{LARGEST:g}, so it cannot be added up.")
    return total, parts


def is_same_reward(attempt: AttemptState, event: AttemptRewarded) -> bool:
    """Return whether the attempt already has exactly this final reward, as after a client repeated its request."""
    recorded = attempt.reward, dict(attempt.parts or {}), attempt.truncated, attempt.role
    return recorded == (event.reward, dict(event.parts), event.truncated, event.role)


def get_attempt(txn: Transaction, key: AttemptId) -> AttemptState:
    """Return an attempt that was started."""
    attempts = get_rollout(txn, key.rollout).attempts
    if not 0 <= key.attempt < len(attempts):
        raise NotFoundError(f"Rollout {key.rollout} has {len(attempts)} attempts, and no attempt {key.attempt}.")
    return attempts[key.attempt]


def get_rollout(txn: Transaction, id: int) -> RolloutState:
    """Return a rollout that was queued."""
    state = txn.state(RolloutState, id)
    if state is None:
        raise NotFoundError(f"The store has no rollout {id}.")
    return state


def check_unsealed(txn: Transaction, key: AttemptId) -> None:
    """Refuse a reward for a sealed rollout."""
    if get_rollout(txn, key.rollout).sealed:
        raise IllegalTransitionError(
            f"Rollout {key.rollout} is sealed, since its run has read it: this reward came too late. Record rewards "
            "before the attempt ends."
        )


def version_error(state: RolloutState, attempt: AttemptState) -> str:
    """Return why no step may train on an attempt that succeeded: a token of it is older than the floor of its rollout.
    Empty if there is no reason. Only an engine that draws with other weights than it was sent is one."""
    if attempt.oldest is None or attempt.oldest >= state.floor:
        return ""
    return f"An engine drew with version {attempt.oldest} after version {state.floor} was published."


def count_drawn(state: RolloutState) -> int:
    """Return how many of its earlier attempts had their own random numbers, for one that starts now."""
    return sum(attempt.status is not Status.INFRA_ERROR for attempt in state.attempts)


def limits_of(state: RolloutState) -> RolloutLimits:
    """Return the limits of a rollout, or the defaults if it has none."""
    return state.limits or RolloutLimits()


def count_retries(state: RolloutState) -> int:
    """Return how often a rollout was queued again."""
    last = state.last
    queued = state.status is Status.QUEUED or (bool(state.why) and last is not None and not last.ended_by_queue)
    return max(0, len(state.attempts) - (not queued))


def stop_reason(txn: Transaction, key: AttemptId) -> str:
    """Return the reason for which a runner must stop an attempt that it has no lease of."""
    state = txn.state(RolloutState, key.rollout)
    if state is None or not 0 <= key.attempt < len(state.attempts):
        return "The store does not know this attempt."
    attempt = state.attempts[key.attempt]
    return attempt.error or f"The attempt is over: {attempt.status}."


def issue_task(txn: Transaction, task: Task, use: RolloutPurpose) -> list[Event]:
    """Return the event that issues a task for this use, or none if it was issued before with the same content."""
    row = task.fields.get("row")
    issued = TaskIssued(task.ordinal, row if isinstance(row, int) else task.ordinal, task.source, task.fields, use)
    known = txn.state(TaskState, task.ordinal)
    if known is None:
        return [issued]
    if not is_same_task(known.task, Task(task.ordinal, issued.fields, task.source)):
        raise conflict_error(f"Task {task.ordinal}", "issued")
    return []


def queue_rollout(id: int, request: RolloutRequest, epoch: int = 0) -> RolloutQueued:
    """Return the event that queues a rollout. epoch: of the owning run."""
    return RolloutQueued(
        id,
        request.task.ordinal,
        request.sample,
        request.use,
        request.limits,
        epoch,
        request.greedy,
        request.floor,
        dict(request.resources),
    )


def is_already_queued(txn: Transaction, new: Mapping[int, RolloutRequest], id: int, request: RolloutRequest) -> bool:
    """Return whether a rollout of this id was queued before with the same content; refuse other content."""
    if id in new:
        known_fields = _request_fields(new[id])
    else:
        state = txn.state(RolloutState, id)
        if state is None:
            return False
        known_fields = (state.task, state.sample, state.use, limits_of(state), state.greedy, state.resources)
    if known_fields != _request_fields(request):
        raise conflict_error(f"Rollout {id}", "queued")
    return True


def _request_fields(request: RolloutRequest) -> tuple[object, ...]:
    """Return what cannot be changed once a rollout is queued."""
    return (
        request.task.ordinal,
        request.sample,
        request.use,
        request.limits,
        request.greedy,
        dict(request.resources),
    )


def check_versions(wanted: Mapping[str, int], resources: Mapping[str, tuple[int, Any]]) -> None:
    """Refuse versions of resources that do not exist. resources: the newest version of each, and its value."""
    for name, version in wanted.items():
        newest = resources[name][0] if name in resources and name != OWNER_RESOURCE else 0
        if not 1 <= version <= newest:
            has = f"has the versions 1 to {newest}" if newest else "does not exist"
            raise NotFoundError(
                f"A rollout is to get version {version} of the resource '{name}', which {has}. Put the resource "
                "first: `put_resource` returns its version."
            )


def is_same_task(left: Task, right: Task) -> bool:
    """Return whether two tasks have the same content. They are compared as text too, since NaN does not equal
    itself."""
    if left.source != right.source:
        return False
    return left.fields == right.fields or json.dumps(to_json_value(left.fields, "")) == json.dumps(
        to_json_value(right.fields, "")
    )


def conflict_error(subject: str, verb: str) -> IllegalTransitionError:
    """Return the error of a repeated request with other content."""
    return IllegalTransitionError(
        f"{subject} was {verb} before with other content, and what was {verb} cannot be changed. Use another number, "
        "or send the same content."
    )
