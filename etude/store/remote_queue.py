"""A desk that is elsewhere, reached over HTTP as if it were here.

    desk = RemoteRolloutQueue("http://10.0.0.7:8700", key)
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

from etude.errors import ConfigError, InvalidKeyError
from etude.records import Turn
from etude.store import messages as wire
from etude.store.events import Event
from etude.store.json_values import to_json_value
from etude.store.request_limits import check_count, check_seconds
from etude.store.rollout_queue import (
    AttemptId,
    AttemptReport,
    Claim,
    QueueOwner,
    Reward,
    RolloutPage,
    RolloutQuery,
    RolloutQueue,
    RolloutRequest,
    RunnerState,
)
from etude.store.states import RolloutState
from etude.store.store_client import StoreClient, WriteBatcher

__all__ = ["RemoteRolloutQueue"]

T = TypeVar("T")
POLL_S = 20.0
"""Seconds that one request waits at most for something to happen; a longer wait is several."""
MOST_PATIENCE_S = 90.0
"""Together with the longest poll it is less than a server keeps its answers for."""
MAX_ITEMS = 1000
"""Of what one request may ask for; who asks for more gets so many at once."""


class RemoteRolloutQueue(RolloutQueue):
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
            raise InvalidKeyError("The key of a store is plain text in one line, and this is not; copy it once more.")
        self.url, self._key = url.rstrip("/"), key
        self._patience_s, self._timeout_s, self._transport = patience_s, timeout_s, transport
        self._life: int | None = None
        self._batchers: dict[asyncio.AbstractEventLoop, WriteBatcher] = {}

    # -- who wants rollouts -------------------------------------------------------------------------------------------

    async def acquire_lease(self, owner: QueueOwner, epoch: int | None = None, lease_s: float | None = None) -> int:
        """A run takes the desk up, or says that it is still there."""
        lease_s = None if lease_s is None else check_seconds(lease_s, "lease_s")
        told = await self._ask("keep", run=owner.run, where=owner.where, life=epoch, lease_s=lease_s)
        number: int = told["life"]
        return number

    def with_epoch(self, epoch: int) -> Self:
        """This desk, at which each word counts only while this is the life of its keeper; with connections of its
        own."""
        made = copy(self)
        made._life, made._batchers = epoch, {}
        return made

    async def enqueue(self, wanted: Sequence[RolloutRequest]) -> list[int]:
        """Queue rollouts; those without an id could be queued twice by asking twice, so this too has a name."""
        ids: list[int] = (await self._ask("enqueue", wanted=[wire.encode_rollout_request(one) for one in wanted]))[
            "ids"
        ]
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
            states += [RolloutState.from_dict(state) for state in told["rollouts"]]
        return states

    async def wait(self, cursor: int, timeout_s: float, limit: int = 256) -> tuple[int, list[RolloutState]]:
        """Rollouts that came to their end after a cursor."""
        until = time.monotonic() + check_seconds(timeout_s, "timeout_s")
        while True:
            left = min(max(until - time.monotonic(), 0.0), POLL_S)
            body = {"cursor": cursor, "timeout_s": left, "limit": min(check_count(limit, "limit"), MAX_ITEMS)}
            told = await self._ask("wait", wait_s=left, **body)
            cursor = told["cursor"]
            if told["rollouts"] or time.monotonic() >= until:
                return cursor, [RolloutState.from_dict(state) for state in told["rollouts"]]

    async def find(self, query: RolloutQuery) -> RolloutPage:
        """The rollouts that were asked for; a page has at most a thousand."""
        asked = {name: getattr(query, name) for name in query.__slots__}
        asked["limit"] = limit = min(check_count(query.limit, "limit"), MAX_ITEMS)
        found: list[RolloutState] = []
        more = False
        for ids in _portions(query.ids) or [()]:
            for tasks in _portions(query.tasks) or [()]:
                told = await self._ask("find", **asked | {"ids": ids, "tasks": tasks})
                found += [RolloutState.from_dict(state) for state in told["rollouts"]]
                more = more or told["more"]
        found.sort(key=lambda state: state.id, reverse=query.sort == "-id")
        return RolloutPage(tuple(found[:limit]), more or len(found) > limit)

    async def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """The turns of an attempt."""
        told = await self._ask("turns", rollout=rollout, attempt=attempt)
        return [wire.decode_turn(turn) for turn in told["turns"]]

    async def history(self, rollout: int) -> list[Event]:
        """All that happened to a rollout, in order."""
        told = await self._ask("history", rollout=rollout)
        return [wire.decode_event(event) for event in told["events"]]

    async def notes(self, rollout: int, attempt: int | None = None) -> list[dict[str, Any]]:
        """What was noted during an attempt."""
        events: list[dict[str, Any]] = (await self._ask("events", rollout=rollout, attempt=attempt))["events"]
        return events

    # -- who plays them -----------------------------------------------------------------------------------------------

    async def claim(self, runner: str, n: int, wait_s: float) -> list[Claim]:
        """Up to `n` rollouts. If this is cancelled, the server hands back what it had claimed for it."""
        until = time.monotonic() + check_seconds(wait_s, "wait_s")
        while True:
            left = min(max(until - time.monotonic(), 0.0), POLL_S)
            told = await self._ask("claim", wait_s=left, runner=runner, n=min(check_count(n, "n"), MAX_ITEMS))
            if told["claims"] or time.monotonic() >= until:
                return [wire.decode_claim(claim) for claim in told["claims"]]

    async def mark_ready(self, key: AttemptId) -> None:
        """An attempt that was prepared runs now."""
        await self._write("ready", key, {})

    async def heartbeat(
        self, runner: str, running: Sequence[AttemptId], info: Mapping[str, Any] | None = None
    ) -> dict[AttemptId, str]:
        """A runner is alive; what it is to stop."""
        said = None if info is None else to_json_value(info, "told")
        stop: dict[AttemptId, str] = {}
        for some in _portions(running) or [()]:
            keys = [wire.encode_attempt_id(key) for key in some]
            heard = await self._ask("heartbeat", runner=runner, running=keys, told=said)
            stop |= {wire.decode_attempt_id(one): one["why"] for one in heard["stop"]}
        return stop

    async def finish(self, key: AttemptId, ended: AttemptReport) -> bool:
        """An attempt is over."""
        counted: bool = (await self._write("finish", key, wire.encode_report(ended)))["counted"]
        return counted

    # -- what is written of an attempt that runs ----------------------------------------------------------------------

    async def record_turn(self, key: AttemptId, turn: Turn) -> int:
        """Write down one call to the model."""
        index: int = (await self._write("turn", key, {"turn": wire.encode_turn(turn)}))["index"]
        return index

    async def record_reward(self, key: AttemptId, reward: Reward, turn: int | None = None) -> None:
        """What an attempt earned, or one of its turns."""
        await self._write("reward", key, {"reward": wire.encode_reward(reward), "turn": turn})

    async def record_note(self, key: AttemptId, name: str, data: Any) -> None:
        """An event that somebody will want to look at."""
        await self._write("note", key, {"event": name, "data": to_json_value(data, "data")})

    # -- what is shared -----------------------------------------------------------------------------------------------

    async def put_resource(self, name: str, value: Any) -> int:
        """A new version of a resource."""
        version: int = (await self._ask("put", resource=name, value=to_json_value(value, "value")))["version"]
        return version

    async def get_resource(self, name: str, version: int | None = None) -> tuple[int, Any]:
        """A resource and its version."""
        told = await self._ask("resource", resource=name, version=version)
        return told["version"], told["value"]

    async def runners(self) -> list[RunnerState]:
        """The runners that spoke within the last minutes."""
        return [wire.decode_runner(runner) for runner in (await self._ask("runners"))["runners"]]

    async def statistics(self) -> dict[str, float]:
        """How many rollouts stand where."""
        statistics: dict[str, float] = (await self._ask("statistics"))["statistics"]
        return statistics

    async def close(self) -> None:
        """Let go of this event loop's connections, once what is being written is written; the server goes on."""
        line = self._batchers.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.close()

    # -- the way there ------------------------------------------------------------------------------------------------

    async def _ask(self, verb: str, *, wait_s: float = 0.0, **body: Any) -> dict[str, Any]:
        """Ask for a verb that goes alone."""
        if verb == "claim":
            body["wait_s"] = wait_s
        return await self._batcher().client.call(verb, wire.to_json(body), wait_s)

    async def _write(self, verb: str, key: AttemptId, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write with what else is being written."""
        document = {"verb": verb, **wire.encode_attempt_id(key), **body}
        return await self._batcher().write(wire.to_json(document))

    def _batcher(self) -> WriteBatcher:
        """The connections of this event loop."""
        loop = asyncio.get_running_loop()
        line = self._batchers.get(loop)
        if line is None:
            for ended in [other for other in list(self._batchers) if other.is_closed()]:
                del self._batchers[ended]
            line = self._batchers[loop] = WriteBatcher(
                StoreClient(self.url, self._key, self._patience_s, self._timeout_s, self._transport, self._life)
            )
        return line


def _portions(of: Sequence[T]) -> list[Sequence[T]]:
    """As many at a time as one request may speak of."""
    return [of[at : at + MAX_ITEMS] for at in range(0, len(of), MAX_ITEMS)]
