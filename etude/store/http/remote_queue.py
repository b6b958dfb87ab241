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
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self, TypeVar

import httpx2

from etude.config.address import check_url
from etude.errors import ConfigError, InvalidKeyError, StoreError
from etude.images import ImageRef
from etude.running_time import running_time
from etude.store.http.client import StoreClient, WriteBatcher
from etude.store.http.forms import decode_reply, encode_arguments
from etude.store.journal.json_values import to_json
from etude.store.journal.states import RolloutState
from etude.store.queue.bounds import MAX_ITEMS, check_count, check_seconds
from etude.store.queue.rollout_queue import RolloutPage, RolloutQuery, RolloutQueue
from etude.store.queue.verbs import Arguments, Verb

T = TypeVar("T")
POLL_S = 20.0
"""Longest wait of one request, in seconds. A longer wait takes several requests."""
REQUEST_IMAGE_BYTES = 8 * 2**20
"""Bytes of the images in one request, if there are several. In base64 they take a third more."""
IMAGES_IN_REPLY = 8
"""Images that one request asks for."""
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
        check_url(url, "The address of the store")
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

    async def send(self, verb: Verb, arguments: Arguments) -> Any:
        """Call a verb at the server: in parts if a list of it is long, and again while a wait has no result."""
        rules = verb.rules
        if rules.most and rules.most in arguments:
            most = min(check_count(arguments[rules.most], rules.most), MAX_ITEMS)
            arguments = {**arguments, rules.most: most}
        if rules.wait:
            return await self._wait(verb, arguments)
        if rules.split:
            return await self._send_parts(verb, arguments)
        return await self._call(verb, arguments)

    async def find(self, query: RolloutQuery) -> RolloutPage:
        limit = min(check_count(query.limit, "limit"), MAX_ITEMS)
        states: list[RolloutState] = []
        more = False
        for ids in _portions(query.ids) or [()]:
            for tasks in _portions(query.tasks) or [()]:
                part = replace(query, ids=tuple(ids), tasks=tuple(tasks), limit=limit)
                page = await super().find(part)
                states += page.rollouts
                more = more or page.more
        states.sort(key=lambda state: state.id, reverse=query.sort == "-id")
        return RolloutPage(tuple(states[:limit]), more or len(states) > limit)

    async def put_images(self, contents: Sequence[bytes]) -> list[ImageRef]:
        """Store images, in requests of some megabytes each."""
        refs: list[ImageRef] = []
        for part in _portions_by_size(contents):
            refs += await super().put_images(part)
        return refs

    async def get_images(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of images, of a few in each request."""
        found: dict[str, bytes] = {}
        for start in range(0, len(digests), IMAGES_IN_REPLY):
            found.update(await super().get_images(digests[start : start + IMAGES_IN_REPLY]))
        return found

    async def _wait(self, verb: Verb, arguments: Arguments) -> Any:
        """Call a verb until it has a result, or the time is over."""
        name = verb.rules.wait
        until = running_time() + check_seconds(arguments.get(name, 0.0), name)
        while True:
            seconds = min(max(until - running_time(), 0.0), POLL_S)
            reply = await self._call(verb, {**arguments, name: seconds}, seconds)
            if reply or running_time() >= until:
                return reply

    async def _send_parts(self, verb: Verb, arguments: Arguments) -> Any:
        """Call a verb for each part of its list, and join the results."""
        name = verb.rules.split
        replies = [await self._call(verb, {**arguments, name: part}) for part in _portions(arguments[name]) or [[]]]
        return None if replies[0] is None else [item for reply in replies for item in reply]

    async def _call(self, verb: Verb, arguments: Arguments, wait_s: float = 0.0) -> Any:
        """Send one request, or one write with the next batch, and return what is in the reply."""
        batcher = self._batcher()
        fields = encode_arguments(verb, arguments)
        if verb.rules.is_batched:
            reply = await batcher.write(to_json({"verb": verb.name, **fields}).encode())
        else:
            reply = await batcher.client.call(verb.name, to_json(fields).encode(), wait_s)
        try:
            return decode_reply(verb, reply)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{self.url} answered '{verb.name}', and its reply is not that of a store ({error!r}). Check the "
                "address."
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


def _portions_by_size(contents: Sequence[bytes]) -> list[list[bytes]]:
    """Split contents into parts that fit into one request each; a large one is a part alone."""
    parts: list[list[bytes]] = []
    size = 0
    for content in contents:
        size += len(content)
        if not parts or size > REQUEST_IMAGE_BYTES or len(parts[-1]) == MAX_ITEMS:
            parts.append([])
            size = len(content)
        parts[-1].append(content)
    return parts


def _portions(items: Sequence[T]) -> list[Sequence[T]]:
    """Split a sequence into parts that fit into one request each."""
    return [items[start : start + MAX_ITEMS] for start in range(0, len(items), MAX_ITEMS)]
