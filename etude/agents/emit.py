"""Rewards and events that an agent sends during an attempt, from any code within it.

    etude.emit.reward(1.0)                                the attempt's final reward, sent once
    etude.emit.reward({"right": 1.0, "short": 0.2})       or in named parts, which are added up
    etude.emit.reward(0.1, turn=0)                        the reward of one turn, any number of times
    etude.emit.event("searched", {"for": "etude"})        an event to look at later

If the attempt runs in this process, the runner sends it to the rollout queue; the call does not wait. A separate
process with `ETUDE_STORE_URL` and `ETUDE_REWARD_KEY` in its environment (a command with `reward_key=True`) sends it to
the store's server, and waits for the reply.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from etude.agents import connect_queue
from etude.agents.attempt_context import Emission, current_attempt, parse_reward
from etude.config.env import AssignedAttempt, read_assigned_attempt
from etude.errors import AgentError, DataError, StoreError
from etude.store.journal.json_values import json_size
from etude.store.queue.rollout_queue import AttemptId

ANSWER_TIMEOUT = 100.0
"""Seconds that a server has to reply, before the call raises."""


def reward(value: float | Mapping[str, float], turn: int | None = None) -> None:
    """Send the attempt's final reward, once. With `turn`, send the reward of one call to the model, by its index from
    0; several for one turn are added up."""
    parsed = parse_reward(value, "`etude.emit.reward` got")
    index: Any = turn
    if index is not None and not (isinstance(index, int) and index >= 0):
        raise AgentError(f"`etude.emit.reward` got turn={turn!r}; turns are counted from 0.")
    _emit(lambda queue, attempt_id: queue.record_reward(attempt_id, parsed, turn), final=turn is None)


def event(name: str, data: Any = None) -> None:
    """Record an event: a name, and any JSON value. Training does not depend on it."""
    title: Any = name
    if not (isinstance(title, str) and title):
        raise AgentError(f"`etude.emit.event` got the name {name!r}; a name is a string that is not empty.")
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AgentError(f"The event `{name}` cannot be written as JSON: {error}.") from error
    payload = json.loads(text)  # a copy: the caller may change the objects later
    try:
        json_size(payload, f"The event `{name}`")
    except DataError as error:
        raise AgentError(str(error)) from error
    _emit(lambda queue, attempt_id: queue.record_note(attempt_id, name, payload))


def _emit(emission: Emission, final: bool = False) -> None:
    context = current_attempt()
    if context is not None:
        context.emit(emission, final)
        return
    assigned = read_assigned_attempt()
    if assigned is None:
        raise AgentError(
            "This code is not part of an attempt: no runner in this process plays one, and `ETUDE_STORE_URL` and "
            "`ETUDE_REWARD_KEY` are not set. Call it within an agent; a command gets the key by "
            "`etude.command(…, reward_key=True)`."
        )
    _remote_emitter(assigned).emit(emission)


class _RemoteEmitter:
    """A client of the store's server on its own event loop thread."""

    def __init__(self, assigned: AssignedAttempt) -> None:
        self._url = assigned.url
        self._attempt_id = AttemptId(assigned.rollout, assigned.attempt)
        self._queue = connect_queue(assigned.url, assigned.reward_key)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="etude-emit", daemon=True).start()

    def emit(self, emission: Emission) -> None:
        """Send a reward or an event, and wait for the reply."""
        sending = asyncio.run_coroutine_threadsafe(emission(self._queue, self._attempt_id), self._loop)
        try:
            sending.result(ANSWER_TIMEOUT)
        except TimeoutError:
            sending.cancel()
            raise StoreError(
                f"The store at {self._url} did not reply within {ANSWER_TIMEOUT:g} s. The reward or event may be lost."
            ) from None


@cache
def _remote_emitter(assigned: AssignedAttempt) -> _RemoteEmitter:
    return _RemoteEmitter(assigned)
