"""What every request to a server of ours goes through before an app sees it, whichever app that is.

It gets a name, which is sent back and is in the log. Its body is read whole, within a time and up to a size, whatever
its headers say of that; what is compressed is inflated, up to the same size. Where an app fails, the answer is a
sentence with the request's name, and the traceback is in the log.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from itertools import count
from typing import Any, TypeAlias

from etude.observe import get_log
from etude.store.wire import LIFE, REQUEST

__all__ = ["MOST_BYTES", "Gate", "problem"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Known: TypeAlias = Callable[[Mapping[bytes, bytes]], bool]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

MOST_BYTES = 32 * 2**20
"""Of a body, as it came and inflated."""
STRANGERS_BYTES = 64 * 2**10
"""Of the body of a request without a key."""
READ_S = 60.0
"""Seconds that a body may take to arrive."""
DRAINED_BYTES, DRAINED_S = 256 * 2**20, 5.0
"""What is still read of a body that is refused, so that who sends it hears why rather than a broken connection."""
_NAME = re.compile(rb"[\x21-\x7e]{1,128}")
_LOG = get_log("store")


class _RefusedError(Exception):
    """A request that no app is to see: a status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _GoneError(Exception):
    """Who asked hung up before all was said."""


def problem(kind: str, message: str, request: str) -> bytes:
    """The body of every answer that is no success."""
    return json.dumps({"error": {"kind": kind, "message": message, "request": request}}).encode()


class Gate:
    """An app, and what stands before it."""

    def __init__(self, app: App, life: str, known: Known, most_bytes: int = MOST_BYTES, read_s: float = READ_S) -> None:
        """known: whether the headers of a request bring a key; without one no more is read of it than a little, so
        that strangers fill no memory, and hear from the app all the same that they need one."""
        self.app, self._life, self._known = app, life.encode(), known
        self._most_bytes, self._read_s = most_bytes, read_s
        self._names = (b"%s-%d" % (self._life, number) for number in count(1))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(REQUEST.encode(), b"")
        name = given if _NAME.fullmatch(given) else next(self._names)
        scope.setdefault("state", {})["request"] = name.decode()
        answer = _Answer(send, [(REQUEST.encode(), name), (LIFE.encode(), self._life)])
        started = time.monotonic()
        try:
            if b"content-length" in headers or b"transfer-encoding" in headers:
                receive = await self._read(scope, headers, receive)
            await self.app(scope, receive, answer)
        except _GoneError:
            return  # nobody is there to be answered
        except _RefusedError as refused:
            await answer.problem(refused.status, "Refused", str(refused), name.decode())
        except Exception:
            _LOG.exception("Request %s, %s %s, failed.", name.decode(), scope["method"], _plain(scope["path"]))
            told = "The server failed at this; its log says more under this request."
            await answer.problem(500, "Failed", told, name.decode())
        _LOG.log(
            20 if 400 <= answer.status < 500 else 10,
            "%s %s answered %d in %.1f ms, as request %s.",
            scope["method"],
            _plain(scope["path"]),
            answer.status,
            1000 * (time.monotonic() - started),
            name.decode(),
        )

    async def _read(self, scope: Message, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """The body, whole and inflated, as an app receives it."""
        more = True

        async def heard() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)  # who has gone sends no more
            return message

        try:
            async with asyncio.timeout(self._read_s):
                body = await self._body(headers, heard)
        except TimeoutError:
            raise _RefusedError(408, f"The body did not arrive within {self._read_s:g} seconds.") from None
        except _RefusedError:
            if more:
                await _drain(receive)
            raise
        told = (b"content-length", b"content-encoding", b"transfer-encoding")
        kept = [(key, value) for key, value in scope["headers"] if key not in told]
        scope["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return first.pop() if first else await receive()

        return replayed

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The body."""
        most = self._most_bytes if self._known(headers) else min(STRANGERS_BYTES, self._most_bytes)
        inflate = _inflater(headers.get(b"content-encoding", b"").strip().lower(), most)
        if int(headers.get(b"content-length", b"0")) > most:
            raise self._too_large(most)
        parts, size, read = [], 0, 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            part = message.get("body", b"")
            read += len(part)
            parts.append(inflate(part, size))
            size += len(parts[-1])
            if max(size, read) > most:
                raise self._too_large(most)
            if not message.get("more_body", False):
                inflate(b"", -1)
                return b"".join(parts)

    def _too_large(self, most: int) -> _RefusedError:
        if most < self._most_bytes:
            told = f"This needs a key, without which no more than {most} bytes are read."
            return _RefusedError(401, told)
        return _RefusedError(
            413, f"The body has more than {most} bytes, counted as sent and as inflated; send less at once."
        )


class _Answer:
    """The sending end: it adds our headers, and knows how far an answer has come."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._headers, self.status = send, headers, 0

    async def __call__(self, message: Message) -> None:
        """Send a part of an answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)

    async def problem(self, status: int, kind: str, why: str, request: str) -> None:
        """Say why not, unless something is being said already."""
        if self.status:
            raise ConnectionAbortedError("an answer broke off in its middle")  # the connection is closed, not ended
        body = problem(kind, why, request)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


def _plain(path: str) -> str:
    """A path as a log may hold it: in one line, whatever a stranger put into it."""
    return path[:200].encode("unicode_escape").decode()


def _inflater(encoding: bytes, most: int) -> Callable[[bytes, int], bytes]:
    """Takes a part and how much came out so far, gives what comes out of it; -1 is the end of what came in."""
    if encoding in (b"", b"identity"):
        return lambda part, _: part
    if encoding not in (b"gzip", b"x-gzip", b"deflate"):
        raise _RefusedError(
            415, f"Content-Encoding {encoding.decode('latin-1')!r} is not read here; gzip and deflate are."
        )
    stream = zlib.decompressobj(wbits=47)  # a gzip or a zlib header, whichever it has

    def inflate(part: bytes, size: int) -> bytes:
        try:
            if size < 0:
                if not stream.eof:
                    raise _RefusedError(400, "The compressed body ends before its end: it was cut short.")
                return b""
            out = stream.decompress(part, most - size + 1)
        except zlib.error as error:
            raise _RefusedError(400, f"The body is not {encoding.decode()}: {error}.") from None
        if stream.unused_data:
            raise _RefusedError(400, "The compressed body goes on behind its end; send it as one stream.")
        return out

    return inflate


async def _drain(receive: Receive) -> None:
    """Read what is still coming, within bounds."""
    left = DRAINED_BYTES
    try:
        async with asyncio.timeout(DRAINED_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
