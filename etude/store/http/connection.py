"""HTTP connections that are held to limits before anything they send is parsed or stored.

The parser of uvicorn's fast protocol collects a header without a limit. Here it is fed small pieces, and the collected
bytes are counted. A head that is too large is answered 431, one that takes too long 408. A connection that does not
read its response is aborted.

A connection is anonymous until a request on it carries a valid key; the middleware, which reads keys, reports that. If
there is no room for a new connection, the oldest anonymous one is closed, even if it is busy. An authenticated
connection is never closed for an anonymous one. If no anonymous connection is left, the new one is answered 503.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
from http import HTTPStatus
from typing import Any, Literal, TypeAlias, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from etude.observe import get_logger
from etude.running_time import running_time
from etude.store.http import request_limits as bounds
from etude.store.queue.records import AttemptId

GOOD_KEY = "etude.good_key"
"""Extension of a request's scope that the middleware calls if the request has a valid key. Its argument is the attempt
of the key, or None."""
PIECE = 4096
"""Bytes that the parser receives at once; they hold a few hundred requests at most."""
KEPT_ALIVE_S = 75
"""Seconds that an idle connection stays open. Clients close theirs earlier, so that none sends on a connection just
closed."""
FRAMING_BYTES = 12 * 2**10
"""Bytes of a chunked body that may be chunk sizes and trailers, in addition to a quarter of its length."""
ANONYMOUS_GRACE_S = 1.0
"""Seconds that an anonymous connection has to send a key before the anonymous quarter applies to it."""
WARNING_INTERVAL_S = 60.0
"""Seconds between two warnings that there is no room."""

Stage: TypeAlias = Literal["idle", "head", "body", "refused"]


class ConnectionLimiter:
    """Limits the number of connections, and chooses which to close if there is no room for another.

    Anonymous connections older than a moment may take a quarter of the room. As far as authenticated connections are
    idle, that quarter is kept free. A new client needs it, since it is anonymous until its first request. No method
    that runs for a new connection iterates over all connections.
    """

    def __init__(self) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = bounds.CONNECTIONS if files == resource.RLIM_INFINITY else files * 3 // 4
        self.max_connections = max(4, min(bounds.CONNECTIONS, most))
        self.anonymous: dict[HttpConnection, float] = {}
        """When each anonymous connection came, the oldest first."""
        self.idle: dict[HttpConnection, None] = {}
        """Authenticated connections for which the server waits, the one idle longest first."""
        self._attempts: dict[AttemptId, dict[HttpConnection, None]] = {}
        """The connections of each attempt, by the first key sent over them; the oldest first."""
        self._last_warning = -WARNING_INTERVAL_S
        self._can_open_files = True

    def admit(self, new: HttpConnection, count: int) -> bool:
        """Admit a connection if there is room, if need be by closing an anonymous one. count: open connections."""
        if count >= self.max_connections:
            self._warn()
            if not self.anonymous:
                return False
            next(iter(self.anonymous)).evict()
        self.anonymous[new] = running_time()
        return True

    def authenticate(self, connection: HttpConnection, attempt: AttemptId | None, count: int) -> None:
        """Mark a connection as authenticated by the key of an attempt, or of none.

        If authenticated connections take more than three quarters of the room, one is closed. It is the oldest of this
        attempt, if the attempt has more than an eighth of the room; else the one idle longest.
        """
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
        """Remove a closed connection."""
        self.anonymous.pop(connection, None)
        self.idle.pop(connection, None)
        if connection.attempt is not None and (siblings := self._attempts.get(connection.attempt)) is not None:
            siblings.pop(connection, None)
            if not siblings:
                del self._attempts[connection.attempt]

    def enforce_limits(self) -> None:
        """Close anonymous connections beyond their quarter, or that leave too much unread. Log if the process can open
        no more files: the system then aborts new connections silently."""
        grace_start = running_time() - ANONYMOUS_GRACE_S
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
        now = running_time()
        if now - self._last_warning >= WARNING_INTERVAL_S:
            self._last_warning = now
            get_logger("store").warning(
                "The server has %d connections, the most that its limit of open files allows, or a quarter as many "
                "without a key. It closes the oldest of these, then idle ones; if there is none, it answers a new one "
                "503. Raise the limit with: ulimit -n",
                self.max_connections,
            )

    def _check_open_files(self) -> None:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if self._can_open_files and error.errno in (errno.EMFILE, errno.ENFILE):
                self._can_open_files = False
                get_logger("store").error(
                    "The server can open no more files (%s), so new connections are aborted until others are "
                    "closed. Raise the limit with `ulimit -n`, or start fewer runners.",
                    error.strerror,
                )
        else:
            if not self._can_open_files:
                get_logger("store").info("The server can open files again.")
            self._can_open_files = True


class HttpServerConfig(uvicorn.Config):
    """The configuration of a server whose connections share one limiter."""

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, http=HttpConnection, **options)
        self.limiter = ConnectionLimiter()


class HttpConnection(HttpToolsProtocol):
    """One connection. The server checks it once a second."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.since: float | None = running_time()
        """Start of the present wait for the client; None while a request is being answered."""
        self.has_request = False
        """True once a request has arrived."""
        self.attempt: AttemptId | None = None
        """The attempt of the first key sent over this connection."""
        self._is_authenticated = False
        self._limiter = cast(HttpServerConfig, config).limiter
        self._stage: Stage = "idle"
        self._head = self._framing = self._body = 0
        self._answering: RequestResponseCycle | None = None
        self._bodies = 0  # bytes of all bodies so far
        self._why: tuple[int, str] | None = None
        self._unread = 0, 0.0  # bytes of responses that the client had not read, and when they last became fewer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        """Accept the connection if there is room."""
        is_admitted = self._limiter.admit(self, len(self.connections))
        super().connection_made(transport)
        if not is_admitted:
            self._refuse(503, "The server has reached its limit of connections. Try again in a moment.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up a closed connection: no request on it will be answered."""
        self._limiter.forget(self)
        self._disconnect_requests()
        super().connection_lost(exc)

    def evict(self) -> None:
        """Close this connection to make room for another."""
        self._limiter.forget(self)
        self.connections.discard(self)
        self._abort()

    def data_received(self, data: bytes) -> None:
        """Feed the parser piece by piece, while the bytes that it collects are within the limits."""
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
        """Handle the first line of a request."""
        self._stage = "head"
        self._head = 0
        if self.since is not None and self.has_request:
            self._wait(running_time())
        super().on_message_begin()
        self.scope["extensions"] = {GOOD_KEY: self._on_authenticated}  # type: ignore[dict-item]  # this extension is a function

    def on_headers_complete(self) -> None:
        """Check the complete headers and start the request."""
        if len(self.headers) > bounds.HEADERS:
            self._why = 431, f"The request has more than {bounds.HEADERS} headers."
        elif len(self.pipeline) >= bounds.PIPELINED:
            self._why = 503, f"More than {bounds.PIPELINED} requests wait on this connection."
        if self._why is None:
            self._stage = "body"
            self._framing = 0
            self._body = 0
            self.has_request = True
            self._wait(None)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count a part of the body."""
        if self._why is None:
            self._body += len(body)
            self._bodies += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a body."""
        if self._why is None:
            self._stage = "idle"
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._wait(running_time() if self.cycle.response_complete and not self.pipeline else None)

    def check_timeouts(self, now: float) -> None:
        """Close the connection if the client has taken too long."""
        if self._abort_if_unread(now) or self.since is None:
            return
        waited = now - self.since
        if self._stage == "refused" or (self._stage == "body" and waited > bounds.DRAINED_S):
            if waited > bounds.DRAINED_S:
                self._abort()
        elif self._stage == "head" and waited > bounds.HEAD_S:
            self._refuse(408, f"The head of the request did not arrive within {bounds.HEAD_S:g} seconds.")
        elif waited > (KEPT_ALIVE_S + bounds.DRAINED_S if self.has_request else bounds.HEAD_S):
            self._abort()  # it sent nothing at all, or does not read its response

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _abort(self) -> None:
        self._disconnect_requests()
        self.transport.abort()

    def _disconnect_requests(self) -> None:
        """Tell every request on this connection, pipelined ones included, that the client has disconnected."""
        if self._answering is not None:
            for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
                cycle.disconnected = True
                cycle.message_event.set()

    def _on_authenticated(self, attempt: AttemptId | None) -> None:
        """Handle a valid key, of an attempt or of none: the connection is no longer anonymous."""
        if not self._is_authenticated:
            self._is_authenticated = True
            self.attempt = attempt
            self._limiter.authenticate(self, attempt, len(self.connections))

    def _wait(self, since: float | None) -> None:
        """Start waiting for the client, or stop waiting if `since` is None."""
        self.since = since
        self._limiter.idle.pop(self, None)
        if since is not None and self._is_authenticated and not self.transport.is_closing():
            self._limiter.idle[self] = None

    def _abort_if_unread(self, now: float) -> bool:
        """Abort the connection if the client has read nothing of the response for long. Before that, it counts as
        idle."""
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
        """Check the received bytes against the limits. framing: the bytes that are not body."""
        if self._stage == "head":
            self._head += framing
            if self._head > bounds.HEAD_BYTES:
                self._why = 431, f"The head of the request has more than {bounds.HEAD_BYTES} bytes."
        elif self._stage == "body":
            self._framing += framing
            if self._framing > FRAMING_BYTES + self._body // 4:
                self._why = 400, "The chunks of the body are too small, or its trailers too large; send larger chunks."

    def _refuse(self, status: int, why: str) -> None:
        """Answer without the app, then read on a little, so that the client receives the answer."""
        answering = self.has_request and not self.cycle.response_complete
        self._stage = "refused"
        self._head = 0
        self._wait(running_time())
        self._unset_keepalive_if_required()
        if answering or status == 400:  # within a response no other can be sent
            self._abort()
            return
        error = {"type": "invalid_request_error", "kind": "Refused", "message": why, "request": ""}
        body = json.dumps({"type": "error", "error": error | {"param": None, "code": None}}).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        retry_after = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(
            f"{head}{retry_after}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
        )
        if status == 503:  # there is no room to keep it open
            self.transport.close()

    def _drain(self, size: int) -> None:
        self._head += size
        if self._head > bounds.DRAINED_BYTES:
            self._abort()
