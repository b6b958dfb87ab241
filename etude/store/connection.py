"""A connection to a server of ours, held to its bounds before anything that it sends is parsed or kept.

The parser of uvicorn's fast protocol collects a header for as long as it comes. Here it is fed a small piece at a time,
and what it has collected is counted: a head that is too large is answered 431, one that takes too long 408, and where
there is no room for another connection, the one that has been silent longest makes room, or the new one is answered
503. None of this looks at a key.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import time
from collections.abc import Collection
from typing import Any, Literal, TypeAlias, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from etude.observe import get_log
from etude.store import bounds

__all__ = ["Connection", "Room", "RoomyConfig"]

PIECE = 4096
"""Bytes that the parser is given at once: of a few hundred requests at most."""
KEPT_ALIVE_S = 75
"""Seconds that a silent connection is kept: longer than clients keep theirs, so that none asks on one just closed."""
FRAMING_BYTES = 12 * 2**10
"""Of a body that came in chunks: what may be sizes and trailers rather than body, beside a quarter of its length."""
TOLD_S = 60.0
"""Seconds between two warnings that there is no room."""
WORDS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}

Stage: TypeAlias = Literal["idle", "head", "body", "refused"]


class Room:
    """How many connections there may be, and which go where there is no room for another."""

    def __init__(self) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = bounds.CONNECTIONS if files == resource.RLIM_INFINITY else files * 3 // 4
        self.most = max(4, min(bounds.CONNECTIONS, most))
        self._told, self._files = -TOLD_S, True

    def enters(self, connections: Collection[Connection]) -> bool:
        """Whether another may come, for which a silent one may have to go: first one that never asked anything."""
        if len(connections) < self.most:
            return True
        now = time.monotonic()
        if now - self._told >= TOLD_S:
            self._told = now
            get_log("store").warning(
                "The server has %d connections, the most that its limit of open files leaves room for: silent ones are "
                "closed, and where there is none, a new one is answered 503. Raise the limit with: ulimit -n",
                self.most,
            )
        silent = (each for each in connections if each.since is not None)
        goes = min(silent, key=lambda each: (each.asked, each.since), default=None)
        if goes is None:
            return False
        connections.discard(goes)  # type: ignore[attr-defined]  # it is uvicorn's set of them
        goes.transport.abort()
        return True

    def look(self) -> None:
        """Say where the process can open no more files: the system then breaks new connections off, and says
        nothing."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if self._files and error.errno in (errno.EMFILE, errno.ENFILE):
                self._files = False
                get_log("store").error(
                    "The server can open no more files (%s), so new connections are broken off until others are "
                    "closed. Raise the limit with `ulimit -n`, or have fewer runners.",
                    error.strerror,
                )
        else:
            if not self._files:
                get_log("store").info("The server can open files again.")
            self._files = True


class RoomyConfig(uvicorn.Config):
    """The configuration of a server whose connections share a room."""

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, http=Connection, **options)
        self.room = Room()


class Connection(HttpToolsProtocol):
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
        self.asked = False
        """True once a request has come."""
        self._stage: Stage = "idle"
        self._head = self._framing = self._body = 0
        self._why: tuple[int, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        """It is there, if there is room."""
        room = cast(RoomyConfig, self.config).room
        enters = room.enters(cast("set[Connection]", self.connections))
        super().connection_made(transport)
        if not enters:
            self._refuse(503, "The server has as many connections as it may have. Try again in a moment.")

    def data_received(self, data: bytes) -> None:
        """Feed the parser, piece by piece, as long as what it collects is within bounds."""
        if self._stage == "refused":
            self._drain(len(data))
            return
        for start in range(0, len(data), PIECE):
            piece = data if len(data) <= PIECE else data[start : start + PIECE]
            body = self._body
            super().data_received(piece)
            if self.transport.is_closing():
                return
            self._count(len(piece) - (self._body - body))
            if self._why is not None:
                self._refuse(*self._why)
                return

    def on_message_begin(self) -> None:
        """The first line comes."""
        self._stage, self._head = "head", 0
        if self.since is not None and self.asked:
            self.since = time.monotonic()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is there, and the request is answered from now on."""
        if len(self.headers) > bounds.HEADERS:
            self._why = 431, f"The request has more than {bounds.HEADERS} headers."
        elif len(self.pipeline) >= bounds.PIPELINED:
            self._why = 503, f"More than {bounds.PIPELINED} requests wait on this connection."
        if self._why is None:
            self._stage, self._framing, self._body, self.since, self.asked = "body", 0, 0, None, True
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if self._why is None:
            self._body += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is whole."""
        if self._why is None:
            self._stage = "idle"
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Answered."""
        self.since = time.monotonic()
        super().on_response_complete()
        if self.pipeline or not self.cycle.response_complete:
            self.since = None

    def look(self, now: float) -> None:
        """End what has been waited for long enough."""
        if self.since is None:
            return
        waited = now - self.since
        if self._stage == "refused" or (self._stage == "body" and waited > bounds.DRAINED_S):
            if waited > bounds.DRAINED_S:
                self.transport.abort()
        elif self._stage == "head" and waited > bounds.HEAD_S:
            self._refuse(408, f"The head of the request did not arrive within {bounds.HEAD_S:g} seconds.")
        elif waited > (KEPT_ALIVE_S + bounds.DRAINED_S if self.asked else bounds.HEAD_S):
            self.transport.abort()  # silent from the beginning, or it does not read what it was answered

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
        answering = self.asked and not self.cycle.response_complete
        self._stage, self.since, self._head = "refused", time.monotonic(), 0
        self._unset_keepalive_if_required()
        if answering or status == 400:  # within an answer nothing else can be said
            self.transport.abort()
            return
        error = {"type": "invalid_request_error", "kind": "Refused", "message": why, "request": ""}
        body = json.dumps({"type": "error", "error": error | {"param": None, "code": None}}).encode()
        head = f"HTTP/1.1 {status} {WORDS[status]}\r\ncontent-type: application/json\r\n"
        more = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(f"{head}{more}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        if status == 503:  # there is no room to wait in
            self.transport.close()

    def _drain(self, size: int) -> None:
        self._head += size
        if self._head > bounds.DRAINED_BYTES:
            self.transport.abort()
