"""The middleware that every request passes before an app sees it.

Each request gets an id, which is sent back and logged. The middleware reads the whole body, within a time and a size
limit, independent of its headers. It inflates a compressed body up to the same size. It refuses JSON that would be too
large to parse, before parsing (`request_limits`).

Long bodies are inflated and counted in a background thread, a few per key at a time. The app receives a refusal as an
exception when it reads the body, and can phrase the reply itself. If an app fails, the reply names the request id, and
the log has the traceback.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from io import BytesIO
from itertools import count
from typing import TypeAlias

from starlette.types import ASGIApp, Message, Receive, Send

from etude.observe import get_logger
from etude.store.http import request_limits as bounds
from etude.store.http.background_thread import BackgroundThread
from etude.store.http.connection import GOOD_KEY
from etude.store.http.headers import REQUEST_ID, STORE_INSTANCE
from etude.store.http.request_limits import RequestRefusedError, check_json_size
from etude.store.queue.keys import Grant

ReadGrant: TypeAlias = Callable[[Mapping[bytes, bytes]], Grant | None]

NO_JSON = "/v1/traces", b"application/x-protobuf"
"""The one route whose bodies need not be JSON, and their content type. Its own parser limits their size."""
SINGLE_HEADERS = (b"authorization", b"x-api-key", b"content-type", b"content-encoding")
"""Headers that may appear only once: of two, the middleware and an app might read different ones."""
MAX_LONG_REQUESTS = 8
"""Long requests that are processed at once for a shared key: the admin key or a runner key."""
ENCODINGS = (b"", b"identity", b"gzip", b"x-gzip", b"deflate")
SENT_PIECE, INFLATED_PIECE = 2**18, 2**20
"""Bytes of a compressed body that are inflated at once, and the most bytes that they become at once."""
MAX_INFLATION = 1032
"""The largest factor by which a compressed body may grow. Before inflation the body counts as this many times its
size."""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_LOG = get_logger("store")


class _DisconnectedError(Exception):
    """The client disconnected before it had sent the whole body."""


def encode_error(kind: str, message: str, request_id: str) -> bytes:
    """Return the body of an error response."""
    return json.dumps({"error": {"kind": kind, "message": message, "request": request_id}}).encode()


def work_slot(background: BackgroundThread, grant: Grant | None, size: int) -> AbstractAsyncContextManager[None]:
    """Wait for a slot to process a long request: one per attempt, one for all requests without a key, and a few per
    shared key."""
    if grant is None:
        return background.slot(None, size)
    return background.slot(grant.owner, size, 1 if grant.attempt_id is not None else MAX_LONG_REQUESTS)


class RequestMiddleware:
    """Wraps an app. The state of each request holds a `BackgroundThread` for heavy work."""

    def __init__(
        self,
        app: ASGIApp,
        instance: str,
        read_grant: ReadGrant,
        max_bytes: int = bounds.BODY_BYTES,
        read_s: float | None = None,
    ) -> None:
        """read_grant: returns the grant of the key in a request's headers, or None. Without a key only a little of the
        body is read, so that such requests cannot fill the memory. The app still answers them that they need a key."""
        self.app = app
        self._instance = instance.encode()
        self._read_grant = read_grant
        self._max_bytes = max_bytes
        self._read_s = bounds.BODY_S if read_s is None else read_s
        self._request_ids = (b"%s-%d" % (self._instance, number) for number in count(1))
        self._background = BackgroundThread()
        self._buffered = _BufferedBytes()

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
        sent_id = headers.get(REQUEST_ID.encode(), b"")
        request_id = sent_id if _REQUEST_ID.fullmatch(sent_id) else next(self._request_ids)
        scope.setdefault("state", {}).update(request=request_id.decode(), aside=self._background)
        answer = _ResponseSender(send, [(REQUEST_ID.encode(), request_id), (STORE_INSTANCE.encode(), self._instance)])
        started = time.monotonic()
        try:
            await self._call_app(scope, headers, receive, answer)
        except _DisconnectedError:
            return  # the client has closed the connection
        except RequestRefusedError as refused:
            await answer.send_error(refused.status, "Refused", str(refused), request_id.decode())
        except Exception:
            _LOG.exception("Request %s, %s %s, failed.", request_id.decode(), scope["method"], scope["path"][:200])
            message = "The server failed on this request; its log has the details under this request id."
            await answer.send_error(500, "Failed", message, request_id.decode())
        _LOG.log(
            20 if 400 <= answer.status < 500 else 10,
            "%s %s answered %d in %.1f ms, as request %s.",
            scope["method"],
            scope["path"][:200],
            answer.status,
            1000 * (time.monotonic() - started),
            request_id.decode(),
        )

    async def _call_app(
        self, scope: Message, headers: dict[bytes, bytes], receive: Receive, answer: _ResponseSender
    ) -> None:
        """Call the app with the body, if there is one."""
        grant = self._read_grant(headers)
        if grant is not None and GOOD_KEY in scope.get("extensions", ()):
            scope["extensions"][GOOD_KEY](grant.attempt_id)
        if b"content-length" not in headers and b"transfer-encoding" not in headers:
            _refuse_duplicate_headers(scope)
            await self.app(scope, receive, answer)
            return
        with self._buffered.of(grant) as buffer:
            await self.app(scope, await self._buffer_body(scope, headers, receive, buffer), answer)

    async def _buffer_body(
        self, scope: Message, headers: dict[bytes, bytes], receive: Receive, buffer: _RequestBuffer
    ) -> Receive:
        """Return a `receive` that yields the whole inflated body, or that raises its refusal."""
        more = True

        async def receive_part() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)  # missing in a disconnect
            return message

        try:
            body = await self._read_body(scope, headers, receive_part, buffer)
        except RequestRefusedError as refused:
            buffer.release()
            if more:
                await _drain(receive)
            status, why = refused.status, str(refused)

            # a new exception: the traceback of the first one would hold the body, in a cycle with this function
            async def raise_refusal() -> Message:
                raise RequestRefusedError(status, why)

            return raise_refusal
        replaced = (b"content-length", b"content-encoding", b"transfer-encoding")
        headers_left = [(key, value) for key, value in scope["headers"] if key not in replaced]
        scope["headers"] = [*headers_left, (b"content-length", str(len(body)).encode())]
        body_message: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return body_message.pop() if body_message else await receive()

        return replay

    async def _read_body(
        self, scope: Message, headers: dict[bytes, bytes], receive: Receive, buffer: _RequestBuffer
    ) -> bytes:
        """Read the body within its limits of time and size, inflate it, and check that it may be parsed."""
        _refuse_duplicate_headers(scope)
        max_bytes = self._max_body(buffer.grant)
        encoding = headers.get(b"content-encoding", b"").strip().lower()
        if encoding not in ENCODINGS:
            name = encoding.decode("latin-1")
            raise RequestRefusedError(415, f"Content-Encoding {name!r} is not supported; use gzip or deflate.")
        if int(headers.get(b"content-length", b"0")) > max_bytes:
            raise self._too_large(max_bytes, buffer.grant)
        read_s = min(bounds.ANONYMOUS_S, self._read_s) if buffer.grant is None else self._read_s
        try:
            async with asyncio.timeout(read_s):
                body = await self._receive_body(receive, buffer, max_bytes)
        except TimeoutError:
            raise RequestRefusedError(408, f"The body did not arrive within {read_s:g} seconds.") from None
        is_compressed = encoding not in (b"", b"identity")
        size = len(body)
        async with work_slot(self._background, buffer.grant, MAX_INFLATION * size if is_compressed else size):
            if is_compressed:
                body = await self._inflate_body(_Inflater(body, encoding.decode()), size, buffer, max_bytes)
            if (scope["path"], headers.get(b"content-type", b"").partition(b";")[0].strip().lower()) != NO_JSON:
                await self._background.run(len(body), check_json_size, body)
        return body

    async def _receive_body(self, receive: Receive, buffer: _RequestBuffer, max_bytes: int) -> bytes:
        parts = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _DisconnectedError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            buffer.hold(size)
            if size > max_bytes:
                raise self._too_large(max_bytes, buffer.grant)
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _inflate_body(self, sent: _Inflater, size: int, buffer: _RequestBuffer, max_bytes: int) -> bytes:
        """Inflate a body. Each piece is counted before it exists; the body as sent counts as the first part of it.
        size: the bytes of the body as sent."""
        inflated = BytesIO()
        while True:
            length = inflated.tell()
            # a short body is always read, so its first piece counts no more than that
            piece_size = bounds.SHORT_BYTES - length if length < bounds.SHORT_BYTES else INFLATED_PIECE
            room = min(piece_size, max_bytes + 1 - length)
            buffer.hold(max(size, length + room))
            piece = await self._background.run(MAX_INFLATION * size, sent.read, room)
            inflated.write(piece)
            if length + len(piece) > max_bytes:
                raise self._too_large(max_bytes, buffer.grant)
            if not piece:
                buffer.hold(max(size, length))
                return inflated.getvalue()

    def _max_body(self, grant: Grant | None) -> int:
        if grant is None:
            return min(bounds.ANONYMOUS_BYTES, self._max_bytes)
        return min(bounds.REWARDS_BYTES, self._max_bytes) if grant.scope == "reward" else self._max_bytes

    def _too_large(self, max_bytes: int, grant: Grant | None) -> RequestRefusedError:
        if grant is None:
            return RequestRefusedError(401, f"This needs a key; without one at most {max_bytes} bytes are read.")
        return RequestRefusedError(
            413, f"The body has more than {max_bytes} bytes, as sent or as inflated; send less in one request."
        )


class _BufferedBytes:
    """Counts the bytes of request bodies in memory, per owner of a key."""

    def __init__(self) -> None:
        self.bytes = self.attempts = 0
        self.by = Counter[Hashable]()

    @contextmanager
    def of(self, grant: Grant | None) -> Iterator[_RequestBuffer]:
        """Count the buffer of one request while it exists."""
        buffer = _RequestBuffer(self, grant)
        try:
            yield buffer
        finally:
            buffer.release()

    def add(self, grant: Grant | None, size: int) -> None:
        """Add bytes, or remove them if `size` is negative."""
        owner = None if grant is None else grant.owner
        self.bytes += size
        self.by[owner] += size
        if not self.by[owner]:
            del self.by[owner]
        if grant is not None and grant.attempt_id is not None:
            self.attempts += size

    def exceeded_limit(self, grant: Grant | None) -> str:
        """Return the limit that is exceeded, in words; empty if there is none."""
        if grant is None:
            limit, sender = bounds.HELD_BY_ANONYMOUS, "without a key"
        elif grant.attempt_id is not None:
            limit, sender = bounds.HELD_BY_ATTEMPT, "by the keys of this attempt"
        else:
            limit, sender = bounds.HELD_BY_KEY, "by this key"
        used = self.by[None if grant is None else grant.owner]
        if used > limit:
            return f"{used} bytes {sender}; at most {limit} are"
        if grant is not None and grant.attempt_id is not None and self.attempts > bounds.HELD_BYTES // 2:
            return f"{self.attempts} bytes by the keys of attempts; at most {bounds.HELD_BYTES // 2} are"
        if self.bytes > bounds.HELD_BYTES:
            return f"{self.bytes} bytes in all; at most {bounds.HELD_BYTES} are"
        return ""


class _RequestBuffer:
    """The memory that one request uses while it is read and answered."""

    def __init__(self, buffered: _BufferedBytes, grant: Grant | None) -> None:
        self._buffered = buffered
        self.grant = grant
        self._bytes = 0

    def hold(self, size: int) -> None:
        """Count this many bytes from now on; refuse the request if they are more and a limit is exceeded."""
        is_more = size > self._bytes
        self._buffered.add(self.grant, size - self._bytes)
        self._bytes = size
        is_short = self.grant is not None and self.grant.attempt_id is None and size <= bounds.SHORT_BYTES
        if is_short or not is_more:
            return
        if crossed := self._buffered.exceeded_limit(self.grant):
            raise RequestRefusedError(
                429, f"Requests under way hold {crossed}. Send this again after others are answered."
            )

    def release(self) -> None:
        """Release all bytes."""
        self.hold(0)


class _Inflater:
    """Inflates a body piece by piece."""

    def __init__(self, body: bytes, encoding: str) -> None:
        self._sent = BytesIO(body)
        self._encoding = encoding
        self._stream = zlib.decompressobj(wbits=47)  # detects a gzip or a zlib header

    def read(self, max_bytes: int) -> bytes:
        """Return the next bytes, at most this many; none at the end."""
        while not self._stream.eof:
            source = self._stream.unconsumed_tail or self._sent.read(SENT_PIECE)
            try:
                piece = self._stream.decompress(source, max_bytes)
            except zlib.error as error:
                raise RequestRefusedError(400, f"The body is not {self._encoding}: {error}.") from None
            if piece:
                return piece
            if not source:
                raise RequestRefusedError(400, "The compressed body is truncated.")
        if self._stream.unused_data or self._sent.read(1):
            raise RequestRefusedError(400, "The compressed body has data after its end; send it as one stream.")
        return b""


class _ResponseSender:
    """Sends the response with the headers of the middleware, and records its status."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.status = 0

    async def __call__(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)

    async def send_error(self, status: int, kind: str, why: str, request_id: str) -> None:
        """Send an error response, unless a response has started."""
        if self.status:
            raise ConnectionAbortedError("a response broke off in its middle")  # so that the connection is aborted
        body = encode_error(kind, why, request_id)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


def _refuse_duplicate_headers(scope: Message) -> None:
    """Refuse a request that repeats a header which must be unique."""
    counts = Counter(name for name, _ in scope["headers"])
    duplicate = next((name.decode() for name in SINGLE_HEADERS if counts[name] > 1), None)
    if duplicate is not None:
        raise RequestRefusedError(
            400, f"The request has the header {duplicate} {counts[duplicate.encode()]} times; send it once."
        )


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drain(receive: Receive) -> None:
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
