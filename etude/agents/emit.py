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

from etude.agents import distant_desk
from etude.agents.earned import earned
from etude.agents.scope import Saying, current
from etude.config.env import Appointed, appointed
from etude.errors import AgentError, DataError, StoreError
from etude.store.bounds import NOTE_BYTES, small
from etude.store.desk import Desk, Key

__all__ = ["event", "reward"]

ANSWERED = 100.0
"""Seconds within which a server answers, or a process learns that it was not heard."""


def reward(value: float | Mapping[str, float], turn: int | None = None) -> None:
    """Say what the attempt earned in all, once; or with `turn` what one of its calls to the model earned, by its place
    from 0, any number of times: that adds up."""
    given = earned(value, "`etude.emit.reward` was given")
    if turn is not None and not _counts(turn):
        raise AgentError(f"`etude.emit.reward` was given turn={turn!r}; turns are counted from 0.")
    _say(lambda desk, key: desk.reward(key, given, turn), final=turn is None)


def event(name: str, data: Any = None) -> None:
    """Note something that happened: a name, and any JSON. Training does not depend on it."""
    if not _is_text(name):
        raise AgentError(f"`etude.emit.event` was given the name {name!r}; a name is text.")
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AgentError(f"The event `{name}` cannot be written as JSON: {error}.") from error
    if len(text) > NOTE_BYTES:
        raise AgentError(f"The event `{name}` has {len(text)} bytes as JSON; {NOTE_BYTES} are kept. Say less.")
    kept = json.loads(text)  # as it is now, whatever becomes of the objects it was made of
    try:
        small(kept, f"The event `{name}`")
    except DataError as error:
        raise AgentError(str(error)) from error
    _say(lambda desk, key: desk.note(key, name, kept))


def _counts(turn: Any) -> bool:
    return isinstance(turn, int) and turn >= 0


def _is_text(name: Any) -> bool:
    return isinstance(name, str) and name != ""


def _say(what: Saying, final: bool = False) -> None:
    scope = current()
    if scope is not None:
        scope.say(what, final)
        return
    place = appointed()
    if place is None:
        raise AgentError(
            "This code is no part of an attempt: no runner in this process plays one, and the environment does not "
            "name one (`ETUDE_STORE_URL` and `ETUDE_REWARD_KEY`). Call it from within an agent; a command has the key "
            "with `etude.command(…, reward_key=True)`."
        )
    _wire(place).say(what)


class _Wire:
    """A loop of its own beside the program, on which the desk's server is spoken to."""

    def __init__(self, place: Appointed) -> None:
        self._place, self._key = place, Key(place.rollout, place.attempt)
        self._desk: Desk | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="etude-emit", daemon=True).start()

    def say(self, what: Saying) -> None:
        """Tell the desk, and wait until it has heard."""
        asked = asyncio.run_coroutine_threadsafe(self._told(what), self._loop)
        try:
            asked.result(ANSWERED)
        except TimeoutError:
            asked.cancel()
            raise StoreError(
                f"The store at {self._place.url} did not answer within {ANSWERED:g} s; what was said may not be kept."
            ) from None

    async def _told(self, what: Saying) -> None:
        if self._desk is None:
            self._desk = distant_desk(self._place.url, self._place.reward_key)
        await what(self._desk, self._key)


@cache
def _wire(place: Appointed) -> _Wire:
    return _Wire(place)
