"""A desk that is elsewhere, reached over HTTP as if it were here.

    desk = RemoteDesk("http://10.0.0.7:8700", key)
    for claim in await desk.claim("runner-3", n=8, wait_s=30.0): ...

Connections are kept. What is written of attempts (ready, turn, reward, note, finish) travels together: while one
request is under way, what comes up meanwhile is collected, and goes as the next. Large bodies are compressed.

What fails on the way is tried again, for `patience_s`, so that a server may be restarted meanwhile; after that it is a
`StoreError`. What must not be done twice is sent under a name of its own, by which the server knows it again: a claim
whose answer was lost is given again, and a turn is written once. Where the server was restarted between the two, it
remembers no names: an attempt claimed just then falls silent and is tried again, and a turn, or what a turn was paid,
is a `StoreError` that says so, since to write it again might count it twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Self, TypeVar

import httpx2

from etude.errors import ConfigError, KeyRefusedError
from etude.records import Turn
from etude.store import wire
from etude.store.bounds import at_least_one, bounded
from etude.store.desk import Claim, Desk, Ended, Find, Keeper, Key, Page, Reward, RunnerState, Wanted
from etude.store.events import Event
from etude.store.line import Line, Link
from etude.store.plain import plain
from etude.store.states import RolloutState

__all__ = ["RemoteDesk"]

T = TypeVar("T")
POLL_S = 20.0
"""Seconds that one request waits at most for something to happen; a longer wait is several."""
MOST_PATIENCE_S = 90.0
"""Together with the longest poll it is less than a server keeps its answers for."""
MOST = 1000
"""Of what one request may ask for; who asks for more gets so many at once."""


class RemoteDesk(Desk):
    """The desk behind a server's address. It may be used from several event loops, each with connections of its own."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        patience_s: float = 60.0,
        timeout_s: float = 30.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        address = httpx2.URL(url)
        if address.scheme not in ("http", "https"):
            raise ConfigError(f"The address of a store begins with http:// or https://, and '{url}' does not.")
        if address.userinfo:
            raise ConfigError(f"The address of the store at {address.host} has a password in it; a store takes a key.")
        if not 0 <= patience_s <= MOST_PATIENCE_S:
            raise ConfigError(
                f"patience_s is {patience_s:g}; it must be from 0 to {MOST_PATIENCE_S:g}, since a server knows for two "
                "minutes what it was asked before."
            )
        if not key or not key.isascii() or not key.isprintable():
            raise KeyRefusedError("The key of a store is plain text in one line, and this is not; copy it once more.")
        self.url, self._key = url.rstrip("/"), key
        self._patience_s, self._timeout_s, self._transport = patience_s, timeout_s, transport
        self._life: int | None = None
        self._lines: dict[asyncio.AbstractEventLoop, Line] = {}

    # -- who wants rollouts -------------------------------------------------------------------------------------------

    async def keep(self, keeper: Keeper, life: int | None = None, lease_s: float | None = None) -> int:
        """A run takes the desk up, or says that it is still there."""
        lease_s = None if lease_s is None else bounded(lease_s, "lease_s")
        told = await self._ask("keep", run=keeper.run, where=keeper.where, life=life, lease_s=lease_s)
        number: int = told["life"]
        return number

    def in_life(self, life: int) -> Self:
        """This desk, at which each word counts only while this is the life of its keeper; with connections of its
        own."""
        made = copy(self)
        made._life, made._lines = life, {}
        return made

    async def enqueue(self, wanted: Sequence[Wanted]) -> list[int]:
        """Queue rollouts; those without an id could be queued twice by asking twice, so this too has a name."""
        ids: list[int] = (await self._ask("enqueue", wanted=[wire.wanted_document(one) for one in wanted]))["ids"]
        return ids

    async def cancel(self, rollouts: Sequence[int], why: str) -> None:
        """Nobody wants these any more."""
        for some in _portions(rollouts) or [[]]:
            await self._ask("cancel", rollouts=[int(rollout) for rollout in some], why=why)

    async def seal(self, rollouts: Sequence[int]) -> list[RolloutState]:
        """These are about to be read, and earn nothing more."""
        states: list[RolloutState] = []
        for some in _portions(rollouts):
            told = await self._ask("seal", rollouts=[int(rollout) for rollout in some])
            states += [RolloutState.restored(state) for state in told["rollouts"]]
        return states

    async def wait(self, cursor: int, timeout_s: float, limit: int = 256) -> tuple[int, list[RolloutState]]:
        """Rollouts that came to their end after a cursor."""
        until = time.monotonic() + bounded(timeout_s, "timeout_s")
        while True:
            left = min(max(until - time.monotonic(), 0.0), POLL_S)
            body = {"cursor": cursor, "timeout_s": left, "limit": min(at_least_one(limit, "limit"), MOST)}
            told = await self._ask("wait", wait_s=left, **body)
            cursor = told["cursor"]
            if told["rollouts"] or time.monotonic() >= until:
                return cursor, [RolloutState.restored(state) for state in told["rollouts"]]

    async def find(self, what: Find) -> Page:
        """The rollouts that were asked for; a page has at most a thousand."""
        asked = {name: getattr(what, name) for name in what.__slots__}
        asked["limit"] = limit = min(at_least_one(what.limit, "limit"), MOST)
        found: list[RolloutState] = []
        more = False
        for ids in _portions(what.ids) or [()]:
            for tasks in _portions(what.tasks) or [()]:
                told = await self._ask("find", **asked | {"ids": ids, "tasks": tasks})
                found += [RolloutState.restored(state) for state in told["rollouts"]]
                more = more or told["more"]
        found.sort(key=lambda state: state.id, reverse=what.sort == "-id")
        return Page(tuple(found[:limit]), more or len(found) > limit)

    async def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """The turns of an attempt."""
        told = await self._ask("turns", rollout=rollout, attempt=attempt)
        return [wire.turn_of(turn) for turn in told["turns"]]

    async def history(self, rollout: int) -> list[Event]:
        """All that happened to a rollout, in order."""
        told = await self._ask("history", rollout=rollout)
        return [wire.event_of(event) for event in told["events"]]

    async def events(self, rollout: int, attempt: int | None = None) -> list[dict[str, Any]]:
        """What was noted during an attempt."""
        events: list[dict[str, Any]] = (await self._ask("events", rollout=rollout, attempt=attempt))["events"]
        return events

    # -- who plays them -----------------------------------------------------------------------------------------------

    async def claim(self, runner: str, n: int, wait_s: float) -> list[Claim]:
        """Up to `n` rollouts. If this is cancelled, the server hands back what it had claimed for it."""
        until = time.monotonic() + bounded(wait_s, "wait_s")
        while True:
            left = min(max(until - time.monotonic(), 0.0), POLL_S)
            told = await self._ask("claim", wait_s=left, runner=runner, n=min(at_least_one(n, "n"), MOST))
            if told["claims"] or time.monotonic() >= until:
                return [wire.claim_of(claim) for claim in told["claims"]]

    async def ready(self, key: Key) -> None:
        """An attempt that was prepared runs now."""
        await self._write("ready", key, {})

    async def heartbeat(
        self, runner: str, running: Sequence[Key], told: Mapping[str, Any] | None = None
    ) -> dict[Key, str]:
        """A runner is alive; what it is to stop."""
        said = None if told is None else plain(told, "told")
        stop: dict[Key, str] = {}
        for some in _portions(running) or [()]:
            keys = [wire.key_document(key) for key in some]
            heard = await self._ask("heartbeat", runner=runner, running=keys, told=said)
            stop |= {wire.key_of(one): one["why"] for one in heard["stop"]}
        return stop

    async def finish(self, key: Key, ended: Ended) -> bool:
        """An attempt is over."""
        counted: bool = (await self._write("finish", key, wire.ended_document(ended)))["counted"]
        return counted

    # -- what is written of an attempt that runs ----------------------------------------------------------------------

    async def turn(self, key: Key, turn: Turn) -> int:
        """Write down one call to the model."""
        index: int = (await self._write("turn", key, {"turn": wire.turn_document(turn)}))["index"]
        return index

    async def reward(self, key: Key, reward: Reward, turn: int | None = None) -> None:
        """What an attempt earned, or one of its turns."""
        await self._write("reward", key, {"reward": wire.reward_document(reward), "turn": turn})

    async def note(self, key: Key, name: str, data: Any) -> None:
        """An event that somebody will want to look at."""
        await self._write("note", key, {"event": name, "data": plain(data, "data")})

    # -- what is shared -----------------------------------------------------------------------------------------------

    async def put(self, name: str, value: Any) -> int:
        """A new version of a resource."""
        version: int = (await self._ask("put", resource=name, value=plain(value, "value")))["version"]
        return version

    async def resource(self, name: str, version: int | None = None) -> tuple[int, Any]:
        """A resource and its version."""
        told = await self._ask("resource", resource=name, version=version)
        return told["version"], told["value"]

    async def runners(self) -> list[RunnerState]:
        """The runners that spoke within the last minutes."""
        return [wire.runner_of(runner) for runner in (await self._ask("runners"))["runners"]]

    async def statistics(self) -> dict[str, float]:
        """How many rollouts stand where."""
        statistics: dict[str, float] = (await self._ask("statistics"))["statistics"]
        return statistics

    async def close(self) -> None:
        """Let go of this event loop's connections, once what is being written is written; the server goes on."""
        line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.close()

    # -- the way there ------------------------------------------------------------------------------------------------

    async def _ask(self, verb: str, *, wait_s: float = 0.0, **body: Any) -> dict[str, Any]:
        """Ask for a verb that goes alone."""
        if verb == "claim":
            body["wait_s"] = wait_s
        return await self._line().link.ask(verb, wire.to_json(body), wait_s)

    async def _write(self, verb: str, key: Key, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write with what else is being written."""
        document = {"verb": verb, **wire.key_document(key), **body}
        return await self._line().write(wire.to_json(document))

    def _line(self) -> Line:
        """The connections of this event loop."""
        loop = asyncio.get_running_loop()
        line = self._lines.get(loop)
        if line is None:
            for ended in [other for other in list(self._lines) if other.is_closed()]:
                del self._lines[ended]
            line = self._lines[loop] = Line(
                Link(self.url, self._key, self._patience_s, self._timeout_s, self._transport, self._life)
            )
        return line


def _portions(of: Sequence[T]) -> list[Sequence[T]]:
    """As many at a time as one request may speak of."""
    return [of[at : at + MOST] for at in range(0, len(of), MOST)]
