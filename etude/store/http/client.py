"""The HTTP client of a `RemoteRolloutQueue`: it retries requests until a deadline, and batches writes."""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Coroutine, Sequence
from typing import Any
from uuid import uuid4

import httpx2

from etude import errors
from etude.errors import EtudeError, StoreError
from etude.observe import get_logger
from etude.running_time import running_time
from etude.store.http.headers import IDEMPOTENCY_KEY, OWNER_EPOCH, SENT_TO, STORE_INSTANCE

_LOG = get_logger("store")
COMPRESS_BYTES = 32 * 1024
"""Size in bytes from which on a body is compressed."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0
"""Seconds of the first pause between two tries, and of the longest. Half of each pause is random."""
RETRYABLE_STATUSES = frozenset({408, 429, 502, 503, 504})
"""Statuses after which a retry may succeed. A proxy in front of the server sends them, or a server that is not
ready."""
CONNECT_S = 5.0
"""Timeout of a connection, in seconds."""
UNKNOWN, NO_INSTANCE = "unknown", "none"
"""The instance of a server that was not asked yet, and the one of a server that is no store."""
SPLIT_STATUSES = frozenset({400, 413, 422})
"""Statuses of a batch that one of its writes may have caused; the writes are then sent one by one."""
MAX_SENDERS = 2
"""Batches under way at once."""
MAX_BATCH_WRITES, MAX_BATCH_BYTES = 512, 4 * 2**20
"""Limits of one batch, in writes and in bytes. A larger write is sent alone."""
ERRORS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, EtudeError)}
"""The error class for each kind that a server names in its reply."""


class StoreClient:
    """The connections of one client to a server, in one event loop."""

    def __init__(
        self,
        url: str,
        key: str,
        patience_s: float,
        timeout_s: float,
        transport: httpx2.AsyncBaseTransport | None,
        epoch: int | None = None,
    ) -> None:
        """Create a client. With `epoch`, the server accepts its requests only while that epoch of the owning run
        lasts."""
        epoch_header = {} if epoch is None else {OWNER_EPOCH: str(epoch)}
        self._url = url
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._instance = UNKNOWN
        self._reached = True
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"} | epoch_header,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=30.0),
            transport=transport,
            verify=httpx2.URL(url).scheme != "http",  # else it reads the certificates, which takes 60 ms
            trust_env=False,
        )

    async def call(self, name: str, body: bytes, wait_s: float = 0.0) -> dict[str, Any]:
        """Send a request and return the reply; raise the error that the server reports."""
        status, document = await self.send(name, body, wait_s)
        if status != 200:
            raise decode_error(document)
        return document

    async def send(self, name: str, body: bytes, wait_s: float = 0.0) -> tuple[int, dict[str, Any]]:
        """Send a request until a store answers, and return the status and the decoded reply."""
        headers = {IDEMPOTENCY_KEY: uuid4().hex}
        if len(body) >= COMPRESS_BYTES:
            compressor = zlib.compressobj(level=1, wbits=31)
            body = compressor.compress(body) + compressor.flush()
            headers["content-encoding"] = "gzip"
        until = running_time() + self._patience_s + wait_s
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
            if running_time() + pause > until:
                raise StoreError(
                    f"The store at {self._url} could not be reached for {self._patience_s:g} seconds; the "
                    f"last time, {why}. Check that it runs and that this machine may connect to it."
                )
            await asyncio.sleep(pause * (0.5 + random.random() / 2))
            pause = min(2 * pause, MAX_BACKOFF_S)

    async def _fetch_instance(self) -> str:
        """Ask for the instance of the server. This comes before any request that must not be executed twice."""
        timeout_s = min(self._timeout_s, CONNECT_S)
        response = await self._send_once(
            self._client.get("/healthz", timeout=timeout_s), timeout_s, maybe_received=False
        )
        if response.status_code in RETRYABLE_STATUSES:
            raise _LostRequestError(f"it answered {response.status_code}", maybe_received=False)
        self._instance = response.headers.get(STORE_INSTANCE, NO_INSTANCE)
        return self._instance

    async def _post(self, name: str, body: bytes, headers: dict[str, str], wait_s: float) -> httpx2.Response:
        timeout_s = self._timeout_s + wait_s
        connect = min(self._timeout_s, CONNECT_S)
        timeouts = httpx2.Timeout(timeout_s, connect=connect)
        request = self._client.post(f"/v1/store/{name}", content=body, headers=headers, timeout=timeouts)
        return await self._send_once(request, timeout_s + connect)

    async def _send_once(
        self, request: Coroutine[Any, Any, httpx2.Response], timeout_s: float, maybe_received: bool = True
    ) -> httpx2.Response:
        """Await a request. `maybe_received`: whether the server may have executed it if no reply arrives."""
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
        """Log the begin and the end of an outage, each once."""
        if is_up != self._reached:
            self._reached = is_up
            where = self._url
            if is_up:
                _LOG.info("The store at %s answers again.", where)
            else:
                _LOG.warning("Requests to the store at %s are retried for %g s: %s.", where, self._patience_s, why)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


class WriteBatcher:
    """Batches writes: those that arrive while a request is under way go with the next request."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self._waiting: list[tuple[bytes, asyncio.Future[dict[str, Any]]]] = []
        self._senders: set[asyncio.Task[None]] = set()

    async def write(self, write: bytes) -> dict[str, Any]:
        """Send a write with the next batch, and return its reply."""
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((write, reply))
        if len(self._senders) < MAX_SENDERS:
            self._senders.add(asyncio.create_task(self._run()))
        return await reply

    async def close(self) -> None:
        """Send the pending writes, and close the client."""
        if self._senders:
            await asyncio.wait(set(self._senders))
        await self.client.close()

    async def _run(self) -> None:
        """Send batches until no write is pending."""
        try:
            while self._waiting:
                await self._send_batch()
        finally:  # before any await, so that the next write starts a new sender and does not rely on this one
            sender = asyncio.current_task()
            assert sender is not None
            self._senders.discard(sender)

    async def _send_batch(self) -> None:
        """Send one batch, and resolve the futures of its writes."""
        batch = self._take_batch()
        try:
            replies = await self._post_batch([write for write, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # any error must resolve the futures
            _LOG.exception("Writes to the store were not sent.")
            message = f"This could not be sent to the store, or its reply could not be read: {error!r}"
            replies = [StoreError(message) for _ in batch]
        for (_, future), reply in zip(batch, replies, strict=True):
            if future.done():  # the caller was cancelled meanwhile
                continue
            if isinstance(reply, EtudeError):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _take_batch(self) -> list[tuple[bytes, asyncio.Future[dict[str, Any]]]]:
        """Remove the oldest writes that fit into one batch."""
        size = count = 0
        for write, _ in self._waiting[:MAX_BATCH_WRITES]:
            size += len(write)
            if count and size > MAX_BATCH_BYTES:
                break
            count += 1
        batch = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return batch

    async def _post_batch(self, writes: Sequence[bytes]) -> list[dict[str, Any] | EtudeError]:
        """Return the reply to each write. If the server refuses a batch as a whole, send each write alone, so that none
        fails because of another."""
        try:
            status, document = await self.client.send("batch", b'{"writes":[' + b",".join(writes) + b"]}")
        except EtudeError as error:
            return [type(error)(*error.args) for _ in writes]
        if status in SPLIT_STATUSES and len(writes) > 1:
            return [reply for write in writes for reply in await self._post_batch([write])]
        if status != 200:
            return [decode_error(document) for _ in writes]
        return [decode_error(reply) if "error" in reply else reply for reply in document["replies"]]


class _LostRequestError(Exception):
    """A try without a reply: the end of a sentence that says why, and whether the server may have received the
    request."""

    def __init__(self, why: str, maybe_received: bool = True) -> None:
        super().__init__(why)
        self.maybe_received = maybe_received


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


def decode_error(document: dict[str, Any]) -> EtudeError:
    """Return the error that a server reports, as an exception of Etude."""
    return ERRORS.get(document["error"]["kind"], StoreError)(document["error"]["message"])


def _parse_reply(response: httpx2.Response) -> dict[str, Any]:
    """Decode the reply of a store. A proxy in front of the store may answer instead, for a while."""
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
    raise StoreError(f"{response.url} answered {status}, and its reply is not that of a store. Check the address.")
