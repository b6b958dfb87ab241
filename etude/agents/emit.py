"""What an agent says on the way: rewards and events, from anywhere inside an attempt.

    etude.emit.reward(1.0)                                the attempt's final reward, said once
    etude.emit.reward({"right": 1.0, "short": 0.2})       or in named parts, which are added up
    etude.emit.reward(0.1, turn=0)                        one turn's, any number of times
    etude.emit.event("searched", {"for": "etude"})        something to look at later

Where an attempt runs in this process it is told to the runner, which tells the desk: nothing here waits. A process of
its own that has `ETUDE_STORE_URL` and `ETUDE_REWARD_KEY` in its environment (a command that was given the key) speaks
to the desk's server, and waits for its answer.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from etude.agents import connect_queue
from etude.agents.attempt_context import Emission, current_attempt
from etude.agents.rewards import parse_reward
from etude.config.env import AssignedAttempt, read_assigned_attempt
from etude.errors import AgentError, DataError, StoreError
from etude.store.request_limits import NOTE_BYTES, check_size
from etude.store.rollout_queue import AttemptId, RolloutQueue

__all__ = ["event", "reward"]

ANSWER_TIMEOUT = 100.0
"""Seconds within which a server answers, or a process learns that it was not heard."""


def reward(value: float | Mapping[str, float], turn: int | None = None) -> None:
    """Say what the attempt earned in all, once; or with `turn` what one of its calls to the model earned, by its place
    from 0, any number of times: that adds up."""
    parsed = parse_reward(value, "`etude.emit.reward` was given")
    if turn is not None and not _is_turn_index(turn):
        raise AgentError(f"`etude.emit.reward` was given turn={turn!r}; turns are counted from 0.")
    _emit(lambda queue, attempt_id: queue.record_reward(attempt_id, parsed, turn), final=turn is None)


def event(name: str, data: Any = None) -> None:
    """Note something that happened: a name, and any JSON. Training does not depend on it."""
    if not _is_event_name(name):
        raise AgentError(f"`etude.emit.event` was given the name {name!r}; a name is text.")
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AgentError(f"The event `{name}` cannot be written as JSON: {error}.") from error
    if len(text) > NOTE_BYTES:
        raise AgentError(f"The event `{name}` has {len(text)} bytes as JSON; {NOTE_BYTES} are kept. Say less.")
    payload = json.loads(text)  # as it is now, whatever becomes of the objects it was made of
    try:
        check_size(payload, f"The event `{name}`")
    except DataError as error:
        raise AgentError(str(error)) from error
    _emit(lambda queue, attempt_id: queue.record_note(attempt_id, name, payload))


def _is_turn_index(turn: Any) -> bool:
    return isinstance(turn, int) and turn >= 0


def _is_event_name(name: Any) -> bool:
    return isinstance(name, str) and name != ""


def _emit(emission: Emission, final: bool = False) -> None:
    context = current_attempt()
    if context is not None:
        context.emit(emission, final)
        return
    assigned = read_assigned_attempt()
    if assigned is None:
        raise AgentError(
            "This code is no part of an attempt: no runner in this process plays one, and the environment does not "
            "name one (`ETUDE_STORE_URL` and `ETUDE_REWARD_KEY`). Call it from within an agent; a command has the key "
            "with `etude.command(…, reward_key=True)`."
        )
    _remote_emitter(assigned).emit(emission)


class _RemoteEmitter:
    """A loop of its own beside the program, on which the desk's server is spoken to."""

    def __init__(self, assigned: AssignedAttempt) -> None:
        self._assigned, self._attempt_id = assigned, AttemptId(assigned.rollout, assigned.attempt)
        self._queue: RolloutQueue | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="etude-emit", daemon=True).start()

    def emit(self, emission: Emission) -> None:
        """Tell the desk, and wait until it has heard."""
        sending = asyncio.run_coroutine_threadsafe(self._send(emission), self._loop)
        try:
            sending.result(ANSWER_TIMEOUT)
        except TimeoutError:
            sending.cancel()
            raise StoreError(
                f"The store at {self._assigned.url} did not answer within {ANSWER_TIMEOUT:g} s; what was said may not "
                "be kept."
            ) from None

    async def _send(self, emission: Emission) -> None:
        if self._queue is None:
            self._queue = connect_queue(self._assigned.url, self._assigned.reward_key)
        await emission(self._queue, self._attempt_id)


@cache
def _remote_emitter(assigned: AssignedAttempt) -> _RemoteEmitter:
    return _RemoteEmitter(assigned)
