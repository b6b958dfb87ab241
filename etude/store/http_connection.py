"""A connection to a server of ours, held to its bounds before anything that it sends is parsed or kept.

The parser of uvicorn's fast protocol collects a header for as long as it comes. Here it is fed a small piece at a time,
and what it has collected is counted: a head that is too large is answered 431, one that takes too long 408. An answer
that is not read is broken off.

A connection is a stranger until a good key came over it; the gate, which reads keys, says so. Where there is no room
for another connection, the stranger that came first makes room, whatever it is doing; a connection with a key never
goes for a stranger. Where no stranger is left, the new one is answered 503.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import time
from typing import Any, Literal, TypeAlias, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from etude.observe import get_logger
from etude.store import request_limits as bounds
from etude.store.rollout_queue import AttemptId

__all__ = ["GOOD_KEY", "ConnectionLimiter", "HttpConnection", "HttpServerConfig"]

GOOD_KEY = "etude.good_key"
"""The extension of a request's scope by which the gate says that it brought a good key: a function of the attempt that
the key speaks for, if it speaks for one."""
PIECE = 4096
"""Bytes that the parser is given at once: of a few hundred requests at most."""
KEPT_ALIVE_S = 75
"""Seconds that a silent connection is kept: longer than clients keep theirs, so that none asks on one just closed."""
FRAMING_BYTES = 12 * 2**10
"""Of a body that came in chunks: what may be sizes and trailers rather than body, beside a quarter of its length."""
ANONYMOUS_GRACE_S = 1.0
"""Seconds that a stranger has to show a key before it counts among those that have a quarter of the room."""
WARNING_INTERVAL_S = 60.0
"""Seconds between two warnings that there is no room."""
REASON_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}

Stage: TypeAlias = Literal["idle", "head", "body", "refused"]


class ConnectionLimiter:
    """How many connections there may be, and which go where there is no room for another.

    Strangers that came longer than a moment ago have a quarter of it, and that quarter is kept for strangers as far as
    connections with a key are silent: a new client is a stranger until its first request. Nothing here looks at all
    connections when one comes.
    """

    def __init__(self) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = bounds.CONNECTIONS if files == resource.RLIM_INFINITY else files * 3 // 4
        self.max_connections = max(4, min(bounds.CONNECTIONS, most))
        self.anonymous: dict[HttpConnection, float] = {}
        """When each came, the first one first."""
        self.idle: dict[HttpConnection, None] = {}
        """Connections with a key for which the server waits, the one that has been silent longest first."""
        self._attempts: dict[AttemptId, dict[HttpConnection, None]] = {}
        """The connections of each attempt, by the first key that came over them; the first one first."""
        self._last_warning, self._can_open_files = -WARNING_INTERVAL_S, True

    def admit(self, new: HttpConnection, count: int) -> bool:
        """Let a connection in if there is room, for which a stranger may have to go. count: those there are."""
        if count >= self.max_connections:
            self._warn()
            if not self.anonymous:
                return False
            next(iter(self.anonymous)).evict()
        self.anonymous[new] = time.monotonic()
        return True

    def authenticate(self, connection: HttpConnection, attempt: AttemptId | None, count: int) -> None:
        """Take a connection that showed a good key out of the strangers. attempt: whose key it is.

        Where it takes of the strangers' quarter, another goes: the first of an attempt that has more than an eighth of
        the room, else the one that has been silent longest."""
        if self.anonymous.pop(connection, None) is None:
            return
        siblings: dict[HttpConnection, None] = {} if attempt is None else self._attempts.setdefault(attempt, {})
        siblings[connection] = None
        if count - len(self.anonymous) > self.max_connections - self.max_connections // 4:
            evicted = next(iter(siblings if len(siblings) > max(1, self.max_connections // 8) else self.idle), None)
            if evicted is not None:
                self._warn()
                evicted.evict()

    def forget(self, connection: HttpConnection) -> None:
        """Let go of a connection that is not there any more."""
        self.anonymous.pop(connection, None)
        self.idle.pop(connection, None)
        if connection.attempt is not None and (siblings := self._attempts.get(connection.attempt)) is not None:
            siblings.pop(connection, None)
            if not siblings:
                del self._attempts[connection.attempt]

    def enforce_limits(self) -> None:
        """Close strangers beyond their quarter, or that leave too much unread; and say where the process can open no
        more files: the system then breaks new connections off, and says nothing."""
        grace_start = time.monotonic() - ANONYMOUS_GRACE_S
        for connection, since in list(self.anonymous.items()):
            if len(self.anonymous) <= self.max_connections // 4 or since > grace_start:
                break
            self._warn()
            connection.evict()
        unread = 0
        for connection in list(self.anonymous):
            size = connection.transport.get_write_buffer_size()
            unread += size
            if size and unread > bounds.ANONYMOUS_UNREAD:
                connection.evict()
        self._check_open_files()

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._last_warning >= WARNING_INTERVAL_S:
            self._last_warning = now
            get_logger("store").warning(
                "The server has %d connections, the most that its limit of open files leaves room for, or a quarter of "
                "as many that showed no key: the oldest of these are closed, then silent ones, and where there is "
                "none, a new one is answered 503. Raise the limit with: ulimit -n",
                self.max_connections,
            )

    def _check_open_files(self) -> None:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if self._can_open_files and error.errno in (errno.EMFILE, errno.ENFILE):
                self._can_open_files = False
                get_logger("store").error(
                    "The server can open no more files (%s), so new connections are broken off until others are "
                    "closed. Raise the limit with `ulimit -n`, or have fewer runners.",
                    error.strerror,
                )
        else:
            if not self._can_open_files:
                get_logger("store").info("The server can open files again.")
            self._can_open_files = True


class HttpServerConfig(uvicorn.Config):
    """The configuration of a server whose connections share a room."""

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, http=HttpConnection, **options)
        self.limiter = ConnectionLimiter()


class HttpConnection(HttpToolsProtocol):
    """One connection. It is looked at once a second."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.since: float | None = time.monotonic()
        """Since when something is waited for from the other side; None while a request is being answered."""
        self.has_request = False
        """True once a request has come."""
        self.attempt: AttemptId | None = None
        """The attempt whose key came first over it."""
        self._is_authenticated = False
        self._limiter = cast(HttpServerConfig, config).limiter
        self._stage: Stage = "idle"
        self._head = self._framing = self._body = 0
        self._answering: RequestResponseCycle | None = None
        self._bodies = 0  # bytes of all bodies so far
        self._why: tuple[int, str] | None = None
        self._unread = 0, 0.0  # bytes of answers that the other side had not taken, and when they last became fewer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        """It is there, if there is room."""
        is_admitted = self._limiter.admit(self, len(self.connections))
        super().connection_made(transport)
        if not is_admitted:
            self._refuse(503, "The server has as many connections as it may have. Try again in a moment.")

    def connection_lost(self, exc: Exception | None) -> None:
        """It is not there any more: no request on it is answered."""
        self._limiter.forget(self)
        self._disconnect_requests()
        super().connection_lost(exc)

    def evict(self) -> None:
        """Make room for another."""
        self._limiter.forget(self)
        self.connections.discard(self)
        self._abort()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, piece by piece, as long as what it collects is within bounds."""
        if self._stage == "refused":
            self._drain(len(data))
            return
        for start in range(0, len(data), PIECE):
            piece = data if len(data) <= PIECE else data[start : start + PIECE]
            bodies = self._bodies
            super().data_received(piece)
            if self.transport.is_closing():
                return
            self._count(len(piece) - (self._bodies - bodies))
            if self._why is not None:
                self._refuse(*self._why)
                return

    def on_message_begin(self) -> None:
        """The first line comes."""
        self._stage, self._head = "head", 0
        if self.since is not None and self.has_request:
            self._wait(time.monotonic())
        super().on_message_begin()
        self.scope["extensions"] = {GOOD_KEY: self._on_authenticated}  # type: ignore[dict-item]  # ours is no dict

    def on_headers_complete(self) -> None:
        """The head is there, and the request is answered from now on."""
        if len(self.headers) > bounds.HEADERS:
            self._why = 431, f"The request has more than {bounds.HEADERS} headers."
        elif len(self.pipeline) >= bounds.PIPELINED:
            self._why = 503, f"More than {bounds.PIPELINED} requests wait on this connection."
        if self._why is None:
            self._stage, self._framing, self._body, self.has_request = "body", 0, 0, True
            self._wait(None)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if self._why is None:
            self._body += len(body)
            self._bodies += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is whole."""
        if self._why is None:
            self._stage = "idle"
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Answered."""
        super().on_response_complete()
        self._wait(time.monotonic() if self.cycle.response_complete and not self.pipeline else None)

    def check_timeouts(self, now: float) -> None:
        """End what has been waited for long enough."""
        if self._abort_if_unread(now) or self.since is None:
            return
        waited = now - self.since
        if self._stage == "refused" or (self._stage == "body" and waited > bounds.DRAINED_S):
            if waited > bounds.DRAINED_S:
                self._abort()
        elif self._stage == "head" and waited > bounds.HEAD_S:
            self._refuse(408, f"The head of the request did not arrive within {bounds.HEAD_S:g} seconds.")
        elif waited > (KEPT_ALIVE_S + bounds.DRAINED_S if self.has_request else bounds.HEAD_S):
            self._abort()  # silent from the beginning, or it does not read what it was answered

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _abort(self) -> None:
        """Break it off."""
        self._disconnect_requests()
        self.transport.abort()

    def _disconnect_requests(self) -> None:
        """Tell all requests on it, those that wait behind another as well, that it has gone."""
        if self._answering is not None:
            for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
                cycle.disconnected = True
                cycle.message_event.set()

    def _on_authenticated(self, attempt: AttemptId | None) -> None:
        """A good key came, of an attempt or of none: it is no stranger any more."""
        if not self._is_authenticated:
            self._is_authenticated, self.attempt = True, attempt
            self._limiter.authenticate(self, attempt, len(self.connections))

    def _wait(self, since: float | None) -> None:
        """Wait for the other side from now on, or no longer."""
        self.since = since
        self._limiter.idle.pop(self, None)
        if since is not None and self._is_authenticated and not self.transport.is_closing():
            self._limiter.idle[self] = None

    def _abort_if_unread(self, now: float) -> bool:
        """Break off an answer that has not been read on for long; a connection with one counts as silent before."""
        unread, (size, since) = self.transport.get_write_buffer_size(), self._unread
        if not unread or not size or unread < size:
            self._unread = unread, now
            return False
        self._unread = unread, since
        if now - since > (KEPT_ALIVE_S if self._is_authenticated else bounds.ANONYMOUS_S):
            self._abort()
            return True
        if self._is_authenticated and now - since > bounds.DRAINED_S:
            self._limiter.idle.setdefault(self)
        return False

    def _count(self, framing: int) -> None:
        """Hold what came to its bounds. framing: bytes of it that were no body."""
        if self._stage == "head":
            self._head += framing
            if self._head > bounds.HEAD_BYTES:
                self._why = 431, f"The head of the request has more than {bounds.HEAD_BYTES} bytes."
        elif self._stage == "body":
            self._framing += framing
            if self._framing > FRAMING_BYTES + self._body // 4:
                self._why = 400, "The body comes in chunks so small, or with trailers so large, that it is not read."

    def _refuse(self, status: int, why: str) -> None:
        """Answer without the app, and read a little on, so that the other side hears it."""
        answering = self.has_request and not self.cycle.response_complete
        self._stage, self._head = "refused", 0
        self._wait(time.monotonic())
        self._unset_keepalive_if_required()
        if answering or status == 400:  # within an answer nothing else can be said
            self._abort()
            return
        error = {"type": "invalid_request_error", "kind": "Refused", "message": why, "request": ""}
        body = json.dumps({"type": "error", "error": error | {"param": None, "code": None}}).encode()
        head = f"HTTP/1.1 {status} {REASON_PHRASES[status]}\r\ncontent-type: application/json\r\n"
        retry_after = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(
            f"{head}{retry_after}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
        )
        if status == 503:  # there is no room to wait in
            self.transport.close()

    def _drain(self, size: int) -> None:
        self._head += size
        if self._head > bounds.DRAINED_BYTES:
            self._abort()
