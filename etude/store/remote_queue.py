"""A rollout queue of another process, called over HTTP.

    queue = RemoteRolloutQueue("http://10.0.0.7:8700", key)
    for claim in await queue.claim("runner-3", n=8, wait_s=30.0): ...

The client reuses connections. It batches the writes of attempts (ready, turn, reward, note, finish): while one request
is under way, it collects further writes for the next. Large bodies are compressed.

The client retries a failed request for `patience_s`, so that a server may restart meanwhile; then it raises
`StoreError`. A request that must not be executed twice carries an idempotency key, by which the server recognizes it. A
claim whose reply was lost is answered again; a turn is written once.

A restarted server has forgotten these keys. A rollout claimed just before the restart becomes unresponsive and is
retried. A turn, or the reward of a turn, raises a `StoreError` that says so: writing it again might count it twice.
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

T = TypeVar("T")
POLL_S = 20.0
"""Longest wait of one request, in seconds. A longer wait takes several requests."""
MOST_PATIENCE_S = 90.0
"""Upper limit of `patience_s`. Together with the longest poll it is shorter than a server keeps its replies."""
MAX_ITEMS = 1000
"""Items in one request. A longer list is split."""


class RemoteRolloutQueue(RolloutQueue):
    """A rollout queue behind a server's address. Several event loops may use it, each with its own connections."""

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
            raise ConfigError(f"The address of the store is '{url}'; it must begin with http:// or https://.")
        if address.userinfo:
            raise ConfigError(
                f"The address of the store at {address.host} contains a user or password; a store takes a key instead."
            )
        if not 0 <= patience_s <= MOST_PATIENCE_S:
            raise ConfigError(
                f"patience_s is {patience_s:g}; it must be from 0 to {MOST_PATIENCE_S:g}, since a server recognizes a "
                "repeated request for two minutes only."
            )
        if not key or not key.isascii() or not key.isprintable():
            raise InvalidKeyError(
                "The key of the store must be one line of ASCII text, and this is not. Copy it again."
            )
        self.url, self._key = url.rstrip("/"), key
        self._patience_s, self._timeout_s, self._transport = patience_s, timeout_s, transport
        self._epoch: int | None = None
        self._batchers: dict[asyncio.AbstractEventLoop, WriteBatcher] = {}

    # -- for the trainer ----------------------------------------------------------------------------------------------

    async def acquire_lease(self, owner: QueueOwner, epoch: int | None = None, lease_s: float | None = None) -> int:
        lease_s = None if lease_s is None else check_seconds(lease_s, "lease_s")
        reply = await self._call("keep", run=owner.run, where=owner.where, life=epoch, lease_s=lease_s)
        number: int = reply["life"]
        return number

    def with_epoch(self, epoch: int) -> Self:
        """Return this queue, bound to an epoch, with its own connections: its calls fail once a newer epoch has
        started."""
        queue = copy(self)
        queue._epoch, queue._batchers = epoch, {}
        return queue

    async def enqueue(self, wanted: Sequence[RolloutRequest]) -> list[int]:
        """Queue rollouts and return their ids. The request has an idempotency key, since a rollout without an id could
        be queued twice."""
        ids: list[int] = (
            await self._call("enqueue", wanted=[messages.encode_rollout_request(request) for request in wanted])
        )["ids"]
        return ids

    async def cancel(self, rollouts: Sequence[int], why: str) -> None:
        for portion in _portions(rollouts) or [[]]:
            await self._call("cancel", rollouts=[int(rollout) for rollout in portion], why=why)

    async def seal(self, rollouts: Sequence[int]) -> list[RolloutState]:
        states: list[RolloutState] = []
        for portion in _portions(rollouts):
            reply = await self._call("seal", rollouts=[int(rollout) for rollout in portion])
            states += [RolloutState.from_dict(state) for state in reply["rollouts"]]
        return states

    async def wait(self, cursor: int, timeout_s: float, limit: int = 256) -> tuple[int, list[RolloutState]]:
        until = time.monotonic() + check_seconds(timeout_s, "timeout_s")
        while True:
            wait_s = min(max(until - time.monotonic(), 0.0), POLL_S)
            body = {"cursor": cursor, "timeout_s": wait_s, "limit": min(check_count(limit, "limit"), MAX_ITEMS)}
            reply = await self._call("wait", wait_s=wait_s, **body)
            cursor = reply["cursor"]
            if reply["rollouts"] or time.monotonic() >= until:
                return cursor, [RolloutState.from_dict(state) for state in reply["rollouts"]]

    async def find(self, query: RolloutQuery) -> RolloutPage:
        """Return one page of the rollouts that match a query, at most a thousand."""
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
        reply = await self._call("turns", rollout=rollout, attempt=attempt)
        return [messages.decode_turn(turn) for turn in reply["turns"]]

    async def history(self, rollout: int) -> list[Event]:
        reply = await self._call("history", rollout=rollout)
        return [messages.decode_event(event) for event in reply["events"]]

    async def notes(self, rollout: int, attempt: int | None = None) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = (await self._call("events", rollout=rollout, attempt=attempt))["events"]
        return events

    # -- for runners --------------------------------------------------------------------------------------------------

    async def claim(self, runner: str, n: int, wait_s: float) -> list[Claim]:
        """Claim up to `n` rollouts. If the call is cancelled, the server returns its rollouts to the queue."""
        until = time.monotonic() + check_seconds(wait_s, "wait_s")
        while True:
            poll_s = min(max(until - time.monotonic(), 0.0), POLL_S)
            reply = await self._call("claim", wait_s=poll_s, runner=runner, n=min(check_count(n, "n"), MAX_ITEMS))
            if reply["claims"] or time.monotonic() >= until:
                return [messages.decode_claim(claim) for claim in reply["claims"]]

    async def mark_ready(self, key: AttemptId) -> None:
        await self._write("ready", key, {})

    async def heartbeat(
        self, runner: str, running: Sequence[AttemptId], info: Mapping[str, Any] | None = None
    ) -> dict[AttemptId, str]:
        document = None if info is None else to_json_value(info, "told")
        stop: dict[AttemptId, str] = {}
        for portion in _portions(running) or [()]:
            keys = [messages.encode_attempt_id(key) for key in portion]
            reply = await self._call("heartbeat", runner=runner, running=keys, told=document)
            stop |= {messages.decode_attempt_id(attempt): attempt["why"] for attempt in reply["stop"]}
        return stop

    async def finish(self, key: AttemptId, report: AttemptReport) -> bool:
        counted: bool = (await self._write("finish", key, messages.encode_report(report)))["counted"]
        return counted

    # -- records of a running attempt ---------------------------------------------------------------------------------

    async def record_turn(self, key: AttemptId, turn: Turn, began: float = 0.0) -> int:
        body = {"turn": messages.encode_turn(turn), "began": began}
        index: int = (await self._write("turn", key, body))["index"]
        return index

    async def record_reward(self, key: AttemptId, reward: Reward, turn: int | None = None) -> None:
        await self._write("reward", key, {"reward": messages.encode_reward(reward), "turn": turn})

    async def record_note(self, key: AttemptId, name: str, data: Any) -> None:
        await self._write("note", key, {"event": name, "data": to_json_value(data, "data")})

    # -- resources and statistics -------------------------------------------------------------------------------------

    async def put_resource(self, name: str, value: Any) -> int:
        version: int = (await self._call("put", resource=name, value=to_json_value(value, "value")))["version"]
        return version

    async def get_resource(self, name: str, version: int | None = None) -> tuple[int, Any]:
        reply = await self._call("resource", resource=name, version=version)
        return reply["version"], reply["value"]

    async def runners(self) -> list[RunnerState]:
        return [messages.decode_runner(runner) for runner in (await self._call("runners"))["runners"]]

    async def statistics(self) -> dict[str, float]:
        statistics: dict[str, float] = (await self._call("statistics"))["statistics"]
        return statistics

    async def close(self) -> None:
        """Close the connections of this event loop after the pending writes. The server continues."""
        batcher = self._batchers.pop(asyncio.get_running_loop(), None)
        if batcher is not None:
            await batcher.close()

    # -- transport ----------------------------------------------------------------------------------------------------

    async def _call(self, name: str, *, wait_s: float = 0.0, **body: Any) -> dict[str, Any]:
        """Send a request that is not batched, and return its reply."""
        if name == "claim":
            body["wait_s"] = wait_s
        return await self._batcher().client.call(name, messages.to_json(body), wait_s)

    async def _write(self, name: str, key: AttemptId, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a write, batched with others, and return its reply."""
        document = {"verb": name, **messages.encode_attempt_id(key), **body}
        return await self._batcher().write(messages.to_json(document))

    def _batcher(self) -> WriteBatcher:
        """Return the write batcher of this event loop, with its connections."""
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
    """Split a sequence into parts that fit into one request each."""
    return [items[start : start + MAX_ITEMS] for start in range(0, len(items), MAX_ITEMS)]
