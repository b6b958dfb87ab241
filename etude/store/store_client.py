"""The HTTP client of a `RemoteRolloutQueue`: it retries a request until time is up, and joins many in one."""

from __future__ import annotations

import asyncio
import json
import random
import time
import zlib
from collections.abc import Coroutine, Sequence
from typing import Any
from uuid import uuid4

import httpx2

from etude.errors import (
    ConfigError,
    DataError,
    EtudeError,
    IllegalTransitionError,
    InvalidKeyError,
    NotFoundError,
    RewardError,
    StoreError,
)
from etude.observe import get_logger
from etude.store.messages import IDEMPOTENCY_KEY, OWNER_EPOCH, SENT_TO, STORE_INSTANCE

__all__ = ["StoreClient", "WriteBatcher"]

_LOG = get_logger("store")
COMPRESS_BYTES = 32 * 1024
"""Bytes from which on a body is compressed."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0
"""Seconds of the first wait between two tries, and of the longest; half of it is chance."""
RETRYABLE_STATUSES = frozenset({408, 429, 502, 503, 504})
"""What is answered by something that stands before a server, or by a server that is not ready, when another try may
succeed."""
CONNECT_S = 5.0
"""Seconds that it takes to connect, at most."""
UNKNOWN, NO_INSTANCE = "unknown", "none"
"""The life of a server that was not asked yet, and of what is no server of ours."""
SPLIT_STATUSES = frozenset({413, 422})
"""What is answered where one writing of many is at fault."""
MAX_SENDERS = 2
"""Requests with writings that are under way at once."""
MAX_BATCH_WRITES, MAX_BATCH_BYTES = 512, 4 * 2**20
"""In one request; a writing larger than that goes alone."""
ERRORS: dict[str, type[EtudeError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        DataError,
        IllegalTransitionError,
        InvalidKeyError,
        RewardError,
        StoreError,
        NotFoundError,
    )
}
"""What a server says by name, as it is raised here."""


class StoreClient:
    """One client's connections to a server, in one event loop."""

    def __init__(
        self,
        url: str,
        key: str,
        patience_s: float,
        timeout_s: float,
        transport: httpx2.AsyncBaseTransport | None,
        epoch: int | None = None,
    ) -> None:
        """life: that of the run which keeps the store, where what is said counts only in it."""
        epoch_header = {} if epoch is None else {OWNER_EPOCH: str(epoch)}
        self._url, self._patience_s, self._timeout_s = url, patience_s, timeout_s
        self._instance, self._reached = UNKNOWN, True
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"} | epoch_header,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=30.0),
            transport=transport,
            trust_env=False,
        )

    async def call(self, name: str, body: bytes, wait_s: float = 0.0) -> dict[str, Any]:
        """What is answered; an error where that is a refusal."""
        status, document = await self.send(name, body, wait_s)
        if status != 200:
            raise decode_error(document)
        return document

    async def send(self, name: str, body: bytes, wait_s: float = 0.0) -> tuple[int, dict[str, Any]]:
        """The status and the document that a server of ours answers; asked again while there is none."""
        headers = {IDEMPOTENCY_KEY: uuid4().hex}
        if len(body) >= COMPRESS_BYTES:
            compressor = zlib.compressobj(level=1, wbits=31)
            body = compressor.compress(body) + compressor.flush()
            headers["content-encoding"] = "gzip"
        until = time.monotonic() + self._patience_s + wait_s
        pause = FIRST_BACKOFF_S
        while True:
            instance = self._instance
            try:
                if instance == UNKNOWN:
                    instance = await self._fetch_instance()
                response = await self._post(name, body, headers, wait_s)
                document = _parse_reply(response)
            except _LostRequestError as lost:
                if lost.maybe_received:
                    headers.setdefault(SENT_TO, instance)
                why = str(lost)
            else:
                self._instance = response.headers.get(STORE_INSTANCE, self._instance)
                self._log_outage(True, "")
                return response.status_code, document
            self._log_outage(False, why)
            if time.monotonic() + pause > until:
                raise StoreError(
                    f"The store at {self._url} could not be reached for {self._patience_s:g} seconds; the "
                    f"last time, {why}. See whether it runs, and whether this machine may connect to it."
                )
            await asyncio.sleep(pause * (0.5 + random.random() / 2))
            pause = min(2 * pause, MAX_BACKOFF_S)

    async def _fetch_instance(self) -> str:
        """The life that the server is in, asked before anything is sent that must not be done twice."""
        timeout_s = min(self._timeout_s, CONNECT_S)
        response = await self._send_once(
            self._client.get("/healthz", timeout=timeout_s), timeout_s, maybe_received=False
        )
        if response.status_code in RETRYABLE_STATUSES:
            raise _LostRequestError(f"it answered {response.status_code}", maybe_received=False)
        self._instance = response.headers.get(STORE_INSTANCE, NO_INSTANCE)
        return self._instance

    async def _post(self, name: str, body: bytes, headers: dict[str, str], wait_s: float) -> httpx2.Response:
        """One try."""
        timeout_s = self._timeout_s + wait_s
        connect = min(self._timeout_s, CONNECT_S)
        timeouts = httpx2.Timeout(timeout_s, connect=connect)
        request = self._client.post(f"/v1/store/{name}", content=body, headers=headers, timeout=timeouts)
        return await self._send_once(request, timeout_s + connect)

    async def _send_once(
        self, request: Coroutine[Any, Any, httpx2.Response], timeout_s: float, maybe_received: bool = True
    ) -> httpx2.Response:
        """What came of sending something; heard: whether it did something, where nobody knows what came of it."""
        try:
            async with asyncio.timeout(timeout_s):
                return await request
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise _LostRequestError(
                f"it could not be connected to: {_describe(error)}", maybe_received=False
            ) from error
        except TimeoutError as error:
            raise _LostRequestError(f"it did not answer within {timeout_s:g} seconds", maybe_received) from error
        except httpx2.TransportError as error:
            raise _LostRequestError(f"the connection broke: {_describe(error)}", maybe_received) from error

    def _log_outage(self, is_up: bool, why: str) -> None:
        """Tell of an outage once, and of its end."""
        if is_up != self._reached:
            self._reached = is_up
            where = self._url
            if is_up:
                _LOG.info("The store at %s answers again.", where)
            else:
                _LOG.warning("The store at %s is asked again, for %g s: %s.", where, self._patience_s, why)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.aclose()


class WriteBatcher:
    """Writings that travel together: those that come up while others are under way go with the next request."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self._waiting: list[tuple[bytes, asyncio.Future[dict[str, Any]]]] = []
        self._senders: set[asyncio.Task[None]] = set()

    async def write(self, write: bytes) -> dict[str, Any]:
        """Send this with what else there is; what is answered to it."""
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((write, reply))
        if len(self._senders) < MAX_SENDERS:
            self._senders.add(asyncio.create_task(self._run()))
        return await reply

    async def close(self) -> None:
        """Send what is waiting, and let go."""
        if self._senders:
            await asyncio.wait(set(self._senders))
        await self.client.close()

    async def _run(self) -> None:
        """Send until nothing waits."""
        try:
            while self._waiting:
                await self._send_batch()
        finally:  # at once, so that who writes next begins another lane and does not trust in this one
            sender = asyncio.current_task()
            assert sender is not None
            self._senders.discard(sender)

    async def _send_batch(self) -> None:
        """Send what waits, as much as goes into one request."""
        batch = self._take_batch()
        try:
            replies = await self._post_batch([write for write, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # whatever it is, nobody waits for good
            _LOG.exception("Writings to the store were not sent.")
            message = f"This could not be sent to the store, or its answer not be read: {error!r}"
            replies = [StoreError(message) for _ in batch]
        for (_, future), reply in zip(batch, replies, strict=True):
            if future.done():  # who asked was cancelled meanwhile
                continue
            if isinstance(reply, EtudeError):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _take_batch(self) -> list[tuple[bytes, asyncio.Future[dict[str, Any]]]]:
        """As many as go into one request, those that waited longest first."""
        size = count = 0
        for write, _ in self._waiting[:MAX_BATCH_WRITES]:
            size += len(write)
            if count and size > MAX_BATCH_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _post_batch(self, writes: Sequence[bytes]) -> list[dict[str, Any] | EtudeError]:
        """What is answered to each. Where a request is refused as a whole, each goes alone, so that none fails for
        another's sake."""
        try:
            status, document = await self.client.send("batch", b'{"writings":[' + b",".join(writes) + b"]}")
        except EtudeError as error:
            return [type(error)(*error.args) for _ in writes]
        if status in SPLIT_STATUSES and len(writes) > 1:
            return [reply for write in writes for reply in await self._post_batch([write])]
        if status != 200:
            return [decode_error(document) for _ in writes]
        return [decode_error(reply) if "error" in reply else reply["done"] for reply in document["replies"]]


class _LostRequestError(Exception):
    """A try that came to nothing; why, as a sentence ends, and whether the server may have heard it."""

    def __init__(self, why: str, maybe_received: bool = True) -> None:
        super().__init__(why)
        self.maybe_received = maybe_received


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


def decode_error(document: dict[str, Any]) -> EtudeError:
    """What a server says went wrong, as an error of ours."""
    return ERRORS.get(document["error"]["kind"], StoreError)(document["error"]["message"])


def _parse_reply(response: httpx2.Response) -> dict[str, Any]:
    """What a server of ours answered; what stands before one may answer too, for a while."""
    status = response.status_code
    try:
        document = json.loads(response.content)
        is_store = isinstance(document, dict) and (status == 200 or {"kind", "message"} <= set(document["error"]))
    except (ValueError, KeyError, TypeError):
        is_store = False
    if is_store:
        found: dict[str, Any] = document
        return found
    if status in RETRYABLE_STATUSES:
        raise _LostRequestError(f"it answered {status}")
    raise StoreError(f"{response.url} answered {status}, and not as a store of ours does. Check the address.")
