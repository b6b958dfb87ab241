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
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Self, TypeVar

import httpx2

from etude.errors import ConfigError, InvalidKeyError, StoreError
from etude.store.http.client import StoreClient, WriteBatcher
from etude.store.journal.json_values import to_json
from etude.store.queue.rollout_queue import AttemptId, RolloutQueue

R = TypeVar("R")
MOST_PATIENCE_S = 90.0
"""Upper limit of `patience_s`. Together with the longest poll it is shorter than a server keeps its replies."""


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
        self.url = url.rstrip("/")
        self._key = key
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._transport = transport
        self._epoch: int | None = None
        self._batchers: dict[asyncio.AbstractEventLoop, WriteBatcher] = {}

    def with_epoch(self, epoch: int) -> Self:
        """Return this queue, bound to an epoch, with its own connections: its calls fail once a newer epoch has
        started."""
        queue = copy(self)
        queue._epoch = epoch
        queue._batchers = {}
        return queue

    async def send(self, verb: str, read: Callable[[Any], R], poll_s: float = 0.0, **fields: Any) -> R:
        return self._read(read, await self._batcher().client.call(verb, to_json(fields).encode(), poll_s), verb)

    async def write(self, verb: str, read: Callable[[Any], R], key: AttemptId, **fields: Any) -> R:
        body = to_json({"verb": verb, **key._asdict(), **fields}).encode()
        return self._read(read, await self._batcher().write(body), verb)

    def _read(self, read: Callable[[Any], R], reply: Mapping[str, Any], verb: str) -> R:
        try:
            return read(reply)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{self.url} answered '{verb}', and its reply is not that of a store ({error!r}). Check the address."
            ) from error

    async def close(self) -> None:
        """Close the connections of this event loop after the pending writes. The server continues."""
        batcher = self._batchers.pop(asyncio.get_running_loop(), None)
        if batcher is not None:
            await batcher.close()

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
