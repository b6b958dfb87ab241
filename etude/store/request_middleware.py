"""What every request to a server of ours goes through before an app sees it, whichever app that is.

It gets a name, which is sent back and is in the log. Its body is read whole, within a time and up to a size, whatever
its headers say of that; what is compressed is inflated, up to the same size; and what would be too much to parse is
refused before it is parsed (`request_limits`). What is long is inflated and counted beside the event loop, a few of
each key at a time. An app hears of a refusal when it asks for the body, so that it can say it in its own words. Where
an app fails, the answer is a sentence with the request's name, and the traceback is in the log.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, contextmanager
from itertools import count
from typing import Any, TypeAlias

from etude.observe import get_logger
from etude.store import request_limits as bounds
from etude.store.background_thread import BackgroundThread
from etude.store.http_connection import GOOD_KEY
from etude.store.keys import Grant
from etude.store.messages import REQUEST_ID, STORE_INSTANCE
from etude.store.request_limits import RequestRefusedError, check_json_size

__all__ = ["RequestMiddleware", "encode_error", "work_slot"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ReadGrant: TypeAlias = Callable[[Mapping[bytes, bytes]], Grant | None]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

NO_JSON = "/v1/traces", b"application/x-protobuf"
"""The one route whose bodies may be no JSON, and their content type: its own parser counts what they hold."""
SINGLE = (b"authorization", b"x-api-key", b"content-type", b"content-encoding")
"""Headers that come once: of two, the gate and an app might each read another one."""
SHARED = 8
"""Long requests that are worked on at once of a key that many use: a trainer's, and the runners'."""
ENCODINGS = (b"", b"identity", b"gzip", b"x-gzip", b"deflate")
MAX_INFLATION = 1032
"""How many times as much a compressed body may become: it is taken for that much before it is inflated."""
_NAME = re.compile(rb"[\x21-\x7e]{1,128}")
_LOG = get_logger("store")


class _DisconnectedError(Exception):
    """Who asked hung up before all was said."""


def encode_error(kind: str, message: str, request: str) -> bytes:
    """The body of every answer that is no success."""
    return json.dumps({"error": {"kind": kind, "message": message, "request": request}}).encode()


def work_slot(aside: BackgroundThread, grant: Grant | None, size: int) -> AbstractAsyncContextManager[None]:
    """Room for a long request: an attempt has one worked on at a time, strangers one, and a key that many use a few."""
    if grant is None:
        return aside.slot(None, size)
    return aside.slot(grant.owner, size, 1 if grant.attempt_id is not None else SHARED)


class RequestMiddleware:
    """An app, and what stands before it. Apps find an `BackgroundThread` in the request's state, for what is heavy."""

    def __init__(
        self, app: App, life: str, whose: ReadGrant, most_bytes: int = bounds.BODY_BYTES, read_s: float | None = None
    ) -> None:
        """whose: the key that the headers of a request bring, if there is one; without it no more is read than a
        little, so that strangers fill no memory, and hear from the app all the same that they need one."""
        self.app, self._life, self._read_grant = app, life.encode(), whose
        self._most_bytes, self._read_s = most_bytes, bounds.BODY_S if read_s is None else read_s
        self._names = (b"%s-%d" % (self._life, number) for number in count(1))
        self._background, self._held = BackgroundThread(), _BufferedBytes()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            try:
                await self.app(scope, receive, send)
            finally:
                if scope["type"] == "lifespan":  # the server has stopped
                    self._background.close()
            return
        headers = dict(scope["headers"])
        given = headers.get(REQUEST_ID.encode(), b"")
        name = given if _NAME.fullmatch(given) else next(self._names)
        scope.setdefault("state", {}).update(request=name.decode(), aside=self._background)
        answer = _ResponseSender(send, [(REQUEST_ID.encode(), name), (STORE_INSTANCE.encode(), self._life)])
        started = time.monotonic()
        try:
            await self._call_app(scope, headers, receive, answer)
        except _DisconnectedError:
            return  # nobody is there to be answered
        except RequestRefusedError as refused:
            await answer.send_error(refused.status, "Refused", str(refused), name.decode())
        except Exception:
            _LOG.exception("Request %s, %s %s, failed.", name.decode(), scope["method"], scope["path"][:200])
            told = "The server failed at this; its log says more under this request."
            await answer.send_error(500, "Failed", told, name.decode())
        _LOG.log(
            20 if 400 <= answer.status < 500 else 10,
            "%s %s answered %d in %.1f ms, as request %s.",
            scope["method"],
            scope["path"][:200],
            answer.status,
            1000 * (time.monotonic() - started),
            name.decode(),
        )

    async def _call_app(
        self, scope: Message, headers: dict[bytes, bytes], receive: Receive, answer: _ResponseSender
    ) -> None:
        """Have the app answer, with the body as far as there is one."""
        grant = self._read_grant(headers)
        if grant is not None and GOOD_KEY in scope.get("extensions", ()):
            scope["extensions"][GOOD_KEY](grant.attempt_id)
        if b"content-length" not in headers and b"transfer-encoding" not in headers:
            _refuse_doubles(scope)
            await self.app(scope, receive, answer)
            return
        with self._held.of(grant) as held:
            await self.app(scope, await self._buffer_body(scope, headers, receive, held), answer)

    async def _buffer_body(
        self, scope: Message, headers: dict[bytes, bytes], receive: Receive, held: _RequestBuffer
    ) -> Receive:
        """The body, whole and inflated, as an app receives it; or the refusal of it, as an app hears of that."""
        more = True

        async def heard() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)  # who has gone sends no more
            return message

        try:
            body = await self._read_body(scope, headers, heard, held)
        except RequestRefusedError as refused:
            held.release()
            if more:
                await _drain(receive)
            why = refused

            async def refusing() -> Message:
                raise why

            return refusing
        told = (b"content-length", b"content-encoding", b"transfer-encoding")
        kept = [(key, value) for key, value in scope["headers"] if key not in told]
        scope["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return first.pop() if first else await receive()

        return replayed

    async def _read_body(
        self, scope: Message, headers: dict[bytes, bytes], receive: Receive, held: _RequestBuffer
    ) -> bytes:
        """The body, within its time and its size, inflated, and no more in it than may be parsed."""
        _refuse_doubles(scope)
        most = self._most(held.grant)
        encoding = headers.get(b"content-encoding", b"").strip().lower()
        if encoding not in ENCODINGS:
            said = encoding.decode("latin-1")
            raise RequestRefusedError(415, f"Content-Encoding {said!r} is not read here; gzip and deflate are.")
        if int(headers.get(b"content-length", b"0")) > most:
            raise self._too_large(most, held.grant)
        read_s = min(bounds.ANONYMOUS_S, self._read_s) if held.grant is None else self._read_s
        try:
            async with asyncio.timeout(read_s):
                body = await self._receive_body(receive, held, most)
        except TimeoutError:
            raise RequestRefusedError(408, f"The body did not arrive within {read_s:g} seconds.") from None
        packed = encoding not in (b"", b"identity")
        size = len(body)
        async with work_slot(self._background, held.grant, MAX_INFLATION * size if packed else size):
            if packed:
                body = await self._background.run(MAX_INFLATION * size, _inflated, body, encoding.decode(), most)
                held.take(max(0, len(body) - size))
                if len(body) > most:
                    raise self._too_large(most, held.grant)
            if (scope["path"], headers.get(b"content-type", b"").partition(b";")[0].strip().lower()) != NO_JSON:
                await self._background.run(len(body), check_json_size, body)
        return body

    async def _receive_body(self, receive: Receive, held: _RequestBuffer, most: int) -> bytes:
        """The body as it came."""
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _DisconnectedError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            held.take(len(parts[-1]))
            if size > most:
                raise self._too_large(most, held.grant)
            more = message.get("more_body", False)
        return b"".join(parts)

    def _most(self, grant: Grant | None) -> int:
        """Bytes of a body that comes with this key."""
        if grant is None:
            return min(bounds.ANONYMOUS_BYTES, self._most_bytes)
        return min(bounds.REWARDS_BYTES, self._most_bytes) if grant.scope == "reward" else self._most_bytes

    def _too_large(self, most: int, grant: Grant | None) -> RequestRefusedError:
        if grant is None:
            return RequestRefusedError(401, f"This needs a key, without which no more than {most} bytes are read.")
        return RequestRefusedError(
            413, f"The body has more than {most} bytes, counted as sent and as inflated; send less at once."
        )


class _BufferedBytes:
    """How much of the bodies of requests is in memory, and for which owners of keys."""

    def __init__(self) -> None:
        self.bytes = self.attempts = 0
        self.by = Counter[Hashable]()

    @contextmanager
    def of(self, grant: Grant | None) -> Iterator[_RequestBuffer]:
        """The part of it that one request holds."""
        share = _RequestBuffer(self, grant)
        try:
            yield share
        finally:
            share.release()

    def add(self, grant: Grant | None, size: int) -> None:
        """So much more of it, or less."""
        owner = None if grant is None else grant.owner
        self.bytes += size
        self.by[owner] += size
        if not self.by[owner]:
            del self.by[owner]
        if grant is not None and grant.attempt_id is not None:
            self.attempts += size

    def exceeded_limit(self, grant: Grant | None) -> str:
        """The limit that is crossed, in words; empty where there is room."""
        if grant is None:
            most, whose = bounds.HELD_BY_ANONYMOUS, "without a key"
        elif grant.attempt_id is not None:
            most, whose = bounds.HELD_BY_ATTEMPT, "by the keys of this attempt"
        else:
            most, whose = bounds.HELD_BY_KEY, "by this key"
        own = self.by[None if grant is None else grant.owner]
        if own > most:
            return f"{own} bytes {whose}; at most {most} are"
        if grant is not None and grant.attempt_id is not None and self.attempts > bounds.HELD_BYTES // 2:
            return f"{self.attempts} bytes by the keys of attempts; at most {bounds.HELD_BYTES // 2} are"
        if self.bytes > bounds.HELD_BYTES:
            return f"{self.bytes} bytes in all; at most {bounds.HELD_BYTES} are"
        return ""


class _RequestBuffer:
    """The memory that one request holds while it is read and answered."""

    def __init__(self, held: _BufferedBytes, grant: Grant | None) -> None:
        self._held, self.grant, self._bytes = held, grant, 0

    def take(self, size: int) -> None:
        """So much more of it."""
        self._bytes += size
        self._held.add(self.grant, size)
        if self.grant is not None and self.grant.attempt_id is None and self._bytes <= bounds.SHORT_BYTES:
            return
        if crossed := self._held.exceeded_limit(self.grant):
            raise RequestRefusedError(
                429, f"Requests under way hold {crossed}. Send this again when others are answered."
            )

    def release(self) -> None:
        """All of it."""
        self._held.add(self.grant, -self._bytes)
        self._bytes = 0


class _ResponseSender:
    """The sending end: it adds our headers, and knows how far an answer has come."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._headers, self.status = send, headers, 0

    async def __call__(self, message: Message) -> None:
        """Send a part of an answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)

    async def send_error(self, status: int, kind: str, why: str, request: str) -> None:
        """Say why not, unless something is being said already."""
        if self.status:
            raise ConnectionAbortedError("an answer broke off in its middle")  # the connection is closed, not ended
        body = encode_error(kind, why, request)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


def _refuse_doubles(scope: Message) -> None:
    """Refuse a request with two of a header that has to be one."""
    given = Counter(name for name, _ in scope["headers"])
    double = next((name.decode() for name in SINGLE if given[name] > 1), None)
    if double is not None:
        raise RequestRefusedError(
            400, f"The request has the header {double} {given[double.encode()]} times; send it once."
        )


def _inflated(body: bytes, encoding: str, most: int) -> bytes:
    """Decompress a body, to one byte more than the limit at most."""
    stream = zlib.decompressobj(wbits=47)  # a gzip or a zlib header, whichever it has
    try:
        out = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise RequestRefusedError(400, f"The body is not {encoding}: {error}.") from None
    if stream.unused_data:
        raise RequestRefusedError(400, "The compressed body goes on behind its end; send it as one stream.")
    if not stream.eof and len(out) <= most:
        raise RequestRefusedError(400, "The compressed body ends before its end: it was cut short.")
    return out


async def _drain(receive: Receive) -> None:
    """Read what is still coming, within bounds."""
    left = bounds.DRAINED_BYTES
    try:
        async with asyncio.timeout(bounds.DRAINED_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
