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
COMPRESSED = 32 * 1024
"""Bytes from which on a body is compressed."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds of the first wait between two tries, and of the longest; half of it is chance."""
RETRYABLE_STATUSES = frozenset({408, 429, 502, 503, 504})
"""What is answered by something that stands before a server, or by a server that is not ready, when another try may
succeed."""
CONNECT_S = 5.0
"""Seconds that it takes to connect, at most."""
UNKNOWN, NOT_OURS = "unknown", "none"
"""The life of a server that was not asked yet, and of what is no server of ours."""
WHOLE = frozenset({413, 422})
"""What is answered where one writing of many is at fault."""
MAX_SENDERS = 2
"""Requests with writings that are under way at once."""
MOST_WRITINGS, MOST_BYTES = 512, 4 * 2**20
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
        said = {} if epoch is None else {OWNER_EPOCH: str(epoch)}
        self._url, self._patience_s, self._timeout_s = url, patience_s, timeout_s
        self._instance, self._reached = UNKNOWN, True
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"} | said,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=30.0),
            transport=transport,
            trust_env=False,
        )

    async def call(self, verb: str, body: bytes, wait_s: float = 0.0) -> dict[str, Any]:
        """What is answered; an error where that is a refusal."""
        status, told = await self.send(verb, body, wait_s)
        if status != 200:
            raise decode_error(told)
        return told

    async def send(self, verb: str, body: bytes, wait_s: float = 0.0) -> tuple[int, dict[str, Any]]:
        """The status and the document that a server of ours answers; asked again while there is none."""
        headers = {IDEMPOTENCY_KEY: uuid4().hex}
        if len(body) >= COMPRESSED:
            packer = zlib.compressobj(level=1, wbits=31)
            body = packer.compress(body) + packer.flush()
            headers["content-encoding"] = "gzip"
        until = time.monotonic() + self._patience_s + wait_s
        pause = FIRST_PAUSE
        while True:
            life = self._instance
            try:
                if life == UNKNOWN:
                    life = await self._fetch_instance()
                response = await self._post(verb, body, headers, wait_s)
                told = _document(response)
            except _LostRequestError as lost:
                if lost.maybe_received:
                    headers.setdefault(SENT_TO, life)
                why = str(lost)
            else:
                self._instance = response.headers.get(STORE_INSTANCE, self._instance)
                self._log_outage(True, "")
                return response.status_code, told
            self._log_outage(False, why)
            if time.monotonic() + pause > until:
                raise StoreError(
                    f"The store at {self._url} could not be reached for {self._patience_s:g} seconds; the "
                    f"last time, {why}. See whether it runs, and whether this machine may connect to it."
                )
            await asyncio.sleep(pause * (0.5 + random.random() / 2))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _fetch_instance(self) -> str:
        """The life that the server is in, asked before anything is sent that must not be done twice."""
        within = min(self._timeout_s, CONNECT_S)
        response = await self._send_once(self._client.get("/healthz", timeout=within), within, heard=False)
        if response.status_code in RETRYABLE_STATUSES:
            raise _LostRequestError(f"it answered {response.status_code}", heard=False)
        self._instance = response.headers.get(STORE_INSTANCE, NOT_OURS)
        return self._instance

    async def _post(self, verb: str, body: bytes, headers: dict[str, str], wait_s: float) -> httpx2.Response:
        """One try."""
        within = self._timeout_s + wait_s
        connect = min(self._timeout_s, CONNECT_S)
        times = httpx2.Timeout(within, connect=connect)
        sent = self._client.post(f"/v1/store/{verb}", content=body, headers=headers, timeout=times)
        return await self._send_once(sent, within + connect)

    async def _send_once(
        self, sent: Coroutine[Any, Any, httpx2.Response], within: float, heard: bool = True
    ) -> httpx2.Response:
        """What came of sending something; heard: whether it did something, where nobody knows what came of it."""
        try:
            async with asyncio.timeout(within):
                return await sent
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise _LostRequestError(f"it could not be connected to: {_describe(error)}", heard=False) from error
        except TimeoutError as error:
            raise _LostRequestError(f"it did not answer within {within:g} seconds", heard) from error
        except httpx2.TransportError as error:
            raise _LostRequestError(f"the connection broke: {_describe(error)}", heard) from error

    def _log_outage(self, well: bool, why: str) -> None:
        """Tell of an outage once, and of its end."""
        if well != self._reached:
            self._reached = well
            where = self._url
            if well:
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

    async def write(self, writing: bytes) -> dict[str, Any]:
        """Send this with what else there is; what is answered to it."""
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((writing, reply))
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
            lane = asyncio.current_task()
            assert lane is not None
            self._senders.discard(lane)

    async def _send_batch(self) -> None:
        """Send what waits, as much as goes into one request."""
        taken = self._take()
        try:
            replies = await self._post_batch([writing for writing, _ in taken])
        except asyncio.CancelledError:
            for _, future in taken:
                future.cancel()
            raise
        except Exception as error:  # whatever it is, nobody waits for good
            _LOG.exception("Writings to the store were not sent.")
            told = f"This could not be sent to the store, or its answer not be read: {error!r}"
            replies = [StoreError(told) for _ in taken]
        for (_, future), reply in zip(taken, replies, strict=True):
            if future.done():  # who asked was cancelled meanwhile
                continue
            if isinstance(reply, EtudeError):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _take(self) -> list[tuple[bytes, asyncio.Future[dict[str, Any]]]]:
        """As many as go into one request, those that waited longest first."""
        size = count = 0
        for writing, _ in self._waiting[:MOST_WRITINGS]:
            size += len(writing)
            if count and size > MOST_BYTES:
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    async def _post_batch(self, writings: Sequence[bytes]) -> list[dict[str, Any] | EtudeError]:
        """What is answered to each. Where a request is refused as a whole, each goes alone, so that none fails for
        another's sake."""
        try:
            status, told = await self.client.send("batch", b'{"writings":[' + b",".join(writings) + b"]}")
        except EtudeError as error:
            return [type(error)(*error.args) for _ in writings]
        if status in WHOLE and len(writings) > 1:
            return [reply for writing in writings for reply in await self._post_batch([writing])]
        if status != 200:
            return [decode_error(told) for _ in writings]
        return [decode_error(reply) if "error" in reply else reply["done"] for reply in told["replies"]]


class _LostRequestError(Exception):
    """A try that came to nothing; why, as a sentence ends, and whether the server may have heard it."""

    def __init__(self, why: str, heard: bool = True) -> None:
        super().__init__(why)
        self.maybe_received = heard


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__


def decode_error(told: dict[str, Any]) -> EtudeError:
    """What a server says went wrong, as an error of ours."""
    return ERRORS.get(told["error"]["kind"], StoreError)(told["error"]["message"])


def _document(response: httpx2.Response) -> dict[str, Any]:
    """What a server of ours answered; what stands before one may answer too, for a while."""
    status = response.status_code
    try:
        told = json.loads(response.content)
        ours = isinstance(told, dict) and (status == 200 or {"kind", "message"} <= set(told["error"]))
    except (ValueError, KeyError, TypeError):
        ours = False
    if ours:
        found: dict[str, Any] = told
        return found
    if status in RETRYABLE_STATUSES:
        raise _LostRequestError(f"it answered {status}")
    raise StoreError(f"{response.url} answered {status}, and not as a store of ours does. Check the address.")
