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
from etude.store import messages
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
        self._epoch: int | None = None
        self._batchers: dict[asyncio.AbstractEventLoop, WriteBatcher] = {}

    # -- who wants rollouts -------------------------------------------------------------------------------------------

    async def acquire_lease(self, owner: QueueOwner, epoch: int | None = None, lease_s: float | None = None) -> int:
        """A run takes the desk up, or says that it is still there."""
        lease_s = None if lease_s is None else check_seconds(lease_s, "lease_s")
        reply = await self._call("keep", run=owner.run, where=owner.where, life=epoch, lease_s=lease_s)
        number: int = reply["life"]
        return number

    def with_epoch(self, epoch: int) -> Self:
        """This desk, at which each word counts only while this is the life of its keeper; with connections of its
        own."""
        queue = copy(self)
        queue._epoch, queue._batchers = epoch, {}
        return queue

    async def enqueue(self, wanted: Sequence[RolloutRequest]) -> list[int]:
        """Queue rollouts; those without an id could be queued twice by asking twice, so this too has a name."""
        ids: list[int] = (
            await self._call("enqueue", wanted=[messages.encode_rollout_request(request) for request in wanted])
        )["ids"]
        return ids

    async def cancel(self, rollouts: Sequence[int], why: str) -> None:
        """Nobody wants these any more."""
        for portion in _portions(rollouts) or [[]]:
            await self._call("cancel", rollouts=[int(rollout) for rollout in portion], why=why)

    async def seal(self, rollouts: Sequence[int]) -> list[RolloutState]:
        """These are about to be read, and earn nothing more."""
        states: list[RolloutState] = []
        for portion in _portions(rollouts):
            reply = await self._call("seal", rollouts=[int(rollout) for rollout in portion])
            states += [RolloutState.from_dict(state) for state in reply["rollouts"]]
        return states

    async def wait(self, cursor: int, timeout_s: float, limit: int = 256) -> tuple[int, list[RolloutState]]:
        """Rollouts that came to their end after a cursor."""
        until = time.monotonic() + check_seconds(timeout_s, "timeout_s")
        while True:
            wait_s = min(max(until - time.monotonic(), 0.0), POLL_S)
            body = {"cursor": cursor, "timeout_s": wait_s, "limit": min(check_count(limit, "limit"), MAX_ITEMS)}
            reply = await self._call("wait", wait_s=wait_s, **body)
            cursor = reply["cursor"]
            if reply["rollouts"] or time.monotonic() >= until:
                return cursor, [RolloutState.from_dict(state) for state in reply["rollouts"]]

    async def find(self, query: RolloutQuery) -> RolloutPage:
        """The rollouts that were asked for; a page has at most a thousand."""
        fields = {name: getattr(query, name) for name in query.__slots__}
        fields["limit"] = limit = min(check_count(query.limit, "limit"), MAX_ITEMS)
        states: list[RolloutState] = []
        more = False
        for ids in _portions(query.ids) or [()]:
            for tasks in _portions(query.tasks) or [()]:
                reply = await self._call("find", **fields | {"ids": ids, "tasks": tasks})
                states += [RolloutState.from_dict(state) for state in reply["rollouts"]]
                more = more or reply["more"]
        states.sort(key=lambda state: state.id, reverse=query.sort == "-id")
        return RolloutPage(tuple(states[:limit]), more or len(states) > limit)

    async def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """The turns of an attempt."""
        reply = await self._call("turns", rollout=rollout, attempt=attempt)
        return [messages.decode_turn(turn) for turn in reply["turns"]]

    async def history(self, rollout: int) -> list[Event]:
        """All that happened to a rollout, in order."""
        reply = await self._call("history", rollout=rollout)
        return [messages.decode_event(event) for event in reply["events"]]

    async def notes(self, rollout: int, attempt: int | None = None) -> list[dict[str, Any]]:
        """What was noted during an attempt."""
        events: list[dict[str, Any]] = (await self._call("events", rollout=rollout, attempt=attempt))["events"]
        return events

    # -- who plays them -----------------------------------------------------------------------------------------------

    async def claim(self, runner: str, n: int, wait_s: float) -> list[Claim]:
        """Up to `n` rollouts. If this is cancelled, the server hands back what it had claimed for it."""
        until = time.monotonic() + check_seconds(wait_s, "wait_s")
        while True:
            poll_s = min(max(until - time.monotonic(), 0.0), POLL_S)
            reply = await self._call("claim", wait_s=poll_s, runner=runner, n=min(check_count(n, "n"), MAX_ITEMS))
            if reply["claims"] or time.monotonic() >= until:
                return [messages.decode_claim(claim) for claim in reply["claims"]]

    async def mark_ready(self, key: AttemptId) -> None:
        """An attempt that was prepared runs now."""
        await self._write("ready", key, {})

    async def heartbeat(
        self, runner: str, running: Sequence[AttemptId], info: Mapping[str, Any] | None = None
    ) -> dict[AttemptId, str]:
        """A runner is alive; what it is to stop."""
        document = None if info is None else to_json_value(info, "told")
        stop: dict[AttemptId, str] = {}
        for portion in _portions(running) or [()]:
            keys = [messages.encode_attempt_id(key) for key in portion]
            reply = await self._call("heartbeat", runner=runner, running=keys, told=document)
            stop |= {messages.decode_attempt_id(attempt): attempt["why"] for attempt in reply["stop"]}
        return stop

    async def finish(self, key: AttemptId, report: AttemptReport) -> bool:
        """An attempt is over."""
        counted: bool = (await self._write("finish", key, messages.encode_report(report)))["counted"]
        return counted

    # -- what is written of an attempt that runs ----------------------------------------------------------------------

    async def record_turn(self, key: AttemptId, turn: Turn) -> int:
        """Write down one call to the model."""
        index: int = (await self._write("turn", key, {"turn": messages.encode_turn(turn)}))["index"]
        return index

    async def record_reward(self, key: AttemptId, reward: Reward, turn: int | None = None) -> None:
        """What an attempt earned, or one of its turns."""
        await self._write("reward", key, {"reward": messages.encode_reward(reward), "turn": turn})

    async def record_note(self, key: AttemptId, name: str, data: Any) -> None:
        """An event that somebody will want to look at."""
        await self._write("note", key, {"event": name, "data": to_json_value(data, "data")})

    # -- what is shared -----------------------------------------------------------------------------------------------

    async def put_resource(self, name: str, value: Any) -> int:
        """A new version of a resource."""
        version: int = (await self._call("put", resource=name, value=to_json_value(value, "value")))["version"]
        return version

    async def get_resource(self, name: str, version: int | None = None) -> tuple[int, Any]:
        """A resource and its version."""
        reply = await self._call("resource", resource=name, version=version)
        return reply["version"], reply["value"]

    async def runners(self) -> list[RunnerState]:
        """The runners that spoke within the last minutes."""
        return [messages.decode_runner(runner) for runner in (await self._call("runners"))["runners"]]

    async def statistics(self) -> dict[str, float]:
        """How many rollouts stand where."""
        statistics: dict[str, float] = (await self._call("statistics"))["statistics"]
        return statistics

    async def close(self) -> None:
        """Let go of this event loop's connections, once what is being written is written; the server goes on."""
        batcher = self._batchers.pop(asyncio.get_running_loop(), None)
        if batcher is not None:
            await batcher.close()

    # -- the way there ------------------------------------------------------------------------------------------------

    async def _call(self, name: str, *, wait_s: float = 0.0, **body: Any) -> dict[str, Any]:
        """Ask for a verb that goes alone."""
        if name == "claim":
            body["wait_s"] = wait_s
        return await self._batcher().client.call(name, messages.to_json(body), wait_s)

    async def _write(self, name: str, key: AttemptId, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write with what else is being written."""
        document = {"verb": name, **messages.encode_attempt_id(key), **body}
        return await self._batcher().write(messages.to_json(document))

    def _batcher(self) -> WriteBatcher:
        """The connections of this event loop."""
        loop = asyncio.get_running_loop()
        batcher = self._batchers.get(loop)
        if batcher is None:
            for closed in [other for other in list(self._batchers) if other.is_closed()]:
                del self._batchers[closed]
            batcher = self._batchers[loop] = WriteBatcher(
                StoreClient(self.url, self._key, self._patience_s, self._timeout_s, self._transport, self._epoch)
            )
        return batcher


def _portions(items: Sequence[T]) -> list[Sequence[T]]:
    """As many at a time as one request may speak of."""
    return [items[start : start + MAX_ITEMS] for start in range(0, len(items), MAX_ITEMS)]
