"""A client of one server, on one event loop: requests, streams, and errors in sentences.

`ServerClient` is that of the processes that bring it weights. `ServerEngine`, in another process, also sends requests
there: it knows which requests are under way, and waits for them where that is needed.

A request that the server refuses is the caller's mistake (`DataError`). Any other failure is the server's
(`EngineError`). It is a `ServerUnreachableError` if the server was not reached or broke off, so another may be asked.
No error contains the server's key.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from etude.config.secrets import MASK
from etude.errors import DataError, EngineError
from etude.rollout.server_backend import ServerBackend

CONNECT_TIMEOUT = 10.0
"""Seconds to connect to a server."""
MAX_ERROR_CHARACTERS = 400
"""The most characters of a server's message that an error repeats."""
CLIENT_ERROR_CODES = (400, 413, 422)
AUTH_ERROR_CODES = (401, 403)
NONSENSE = (ValueError, LookupError, TypeError, AttributeError)
"""The errors of reading a reply that makes no sense, as from a proxy in front of the server."""
_EVENT_SEPARATOR = re.compile(rb"\r?\n\r?\n")
_MAX_SEPARATOR = 4
"""The most bytes between two events. What was searched before may end with all of them but one."""


class ServerUnreachableError(EngineError):
    """A server that cannot be reached, or that broke off in the middle."""


class EndpointNotFoundError(EngineError):
    """A server that does not have this endpoint."""


class HttpClient:
    """A client of one server.

    `read_timeout` is how many seconds the server may be silent while a reply is due. `key` is the bearer token.
    """

    def __init__(self, url: str, read_timeout: float = 600.0, *, key: str = "") -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._read_timeout = read_timeout
        self._client = self._new_client()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def disconnect(self) -> None:
        """Break off all requests under way, as if the server had. New requests are possible."""
        client = self._client
        self._client = self._new_client()
        await client.aclose()

    def _new_client(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
        return httpx2.AsyncClient(
            limits=limits,
            timeout=httpx2.Timeout(self._read_timeout, connect=CONNECT_TIMEOUT),
            trust_env=False,
            headers={"authorization": f"Bearer {self._key}"} if self._key else {},
        )

    async def get(self, path: str, *, timeout: float | None = None) -> str:
        """Return the text at this path."""
        return await self._request("GET", path, None, timeout)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> Any:
        """Send a command. Return the reply as JSON or text; None if it is empty."""
        text = await self._request("POST", path, {} if body is None else body, timeout)
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return text

    async def stream_events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
        """Send a request, and yield the events of its reply, each with the number of the read that completed it.

        Closing the iteration tells the server to stop.
        """
        async with self._open("POST", path, body, None) as response:
            buffer = bytearray()
            read = searched = 0
            try:
                async for chunk in response.aiter_bytes():
                    read += 1
                    buffer += chunk
                    start = 0
                    # An event may have megabytes, such as the routes of an answer: its bytes are searched once.
                    for end in _EVENT_SEPARATOR.finditer(buffer, max(searched - _MAX_SEPARATOR + 1, 0)):
                        event, start = bytes(buffer[start : end.start()]), end.end()
                        data = event.removeprefix(b"data:").strip()
                        if data and data != b"[DONE]":
                            yield read, self._parse_event(data)
                    del buffer[:start]
                    searched = len(buffer)
            except httpx2.HTTPError as error:
                raise self._unreachable(error) from error

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None) -> str:
        async with self._open(method, path, body, timeout) as response:
            try:
                return (await response.aread()).decode(errors="replace")
            except httpx2.HTTPError as error:
                raise self._unreachable(error) from error

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, read_timeout: float | None
    ) -> AsyncIterator[httpx2.Response]:
        timeout = self._client.timeout if read_timeout is None else httpx2.Timeout(read_timeout)
        request = self._client.build_request(method, f"{self.url}{path}", json=body, timeout=timeout)
        try:
            response = await self._client.send(request, stream=True)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        try:
            if response.status_code >= 400:
                text = self._redact((await response.aread()).decode(errors="replace"))
                message = f"The server at {self.url} answered {response.status_code} to {path}: {text}"
                if response.status_code in AUTH_ERROR_CODES:
                    message += " It needs another key: name the variable that holds it with `rollout.api_key_env`."
                if response.status_code == 404:
                    raise EndpointNotFoundError(message)
                raise DataError(message) if response.status_code in CLIENT_ERROR_CODES else EngineError(message)
            yield response
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        finally:
            await asyncio.shield(response.aclose())

    def _parse_event(self, data: bytes) -> dict[str, Any]:
        event = self._parse_json(data)
        if not isinstance(event, dict):
            raise EngineError(
                f"The server at {self.url} sent a reply that is no JSON object: {self._redact(str(event))}"
            )
        if event.get("error"):
            raise EngineError(f"The server at {self.url} says: {self._redact(str(event['error']))}")
        return event

    def _parse_json(self, data: str | bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            text = data.decode(errors="replace") if isinstance(data, bytes) else data
            raise EngineError(
                f"The server at {self.url} sent a reply that is not JSON: {self._redact(text)!r}"
            ) from error

    def _redact(self, text: str) -> str:
        """Return the part of a message that an error may repeat, without the key."""
        return (text.replace(self._key, MASK) if self._key else text)[:MAX_ERROR_CHARACTERS]

    def _unreachable(self, error: Exception) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"The server at {self.url} could not be reached ({str(error) or type(error).__name__})."
        )


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The facts about a server that another process needs."""

    url: str
    backend: ServerBackend
    ranks: int
    """The number of server processes that hold a share of the weights."""
    version: int
    """The policy version of its weights."""
    key: str = field(default="", repr=False)
    """Its API key."""
    incarnation: int = 0
    """The number of its restarts. A restart loses all that was set up with the server before."""


class ServerClient(HttpClient):
    """One server."""

    def __init__(
        self, url: str, backend: ServerBackend, *, ranks: int = 1, version: int = 0, key: str = "", incarnation: int = 0
    ) -> None:
        """See `ServerAddress`."""
        super().__init__(url, key=key)
        self.backend = backend
        self.ranks = ranks
        self.version = version
        self.incarnation = incarnation
        self.withdrawn = False

    @classmethod
    def from_address(cls, address: ServerAddress) -> ServerClient:
        """Return a client of the server at this address."""
        fields = {"ranks": address.ranks, "version": address.version, "incarnation": address.incarnation}
        return cls(address.url, address.backend, key=address.key, **fields)

    @property
    def address(self) -> ServerAddress:
        """The facts about this server that another process needs."""
        return ServerAddress(self.url, self.backend, self.ranks, self.version, self._key, self.incarnation)

    def relocate(self, url: str) -> None:
        """Record that the server is another process from now on, at this URL."""
        self.url = url
        self.incarnation += 1

    async def abort(self) -> None:
        """End all requests under way. Every waiting call returns its tokens so far, finished by `abort`."""
        await self.backend.abort(self)

    async def pause_for_update(self) -> None:
        """Pause between two tokens for new weights; requests under way stay."""
        await self.backend.pause_for_update(self)

    async def resume(self) -> None:
        """Continue the requests under way."""
        await self.backend.resume(self)

    async def drain(self) -> None:
        """Return at once: this client does not know the requests under way."""

    async def interrupt(self) -> None:
        """Return at once: this client does not know the requests under way."""

    def withdraw(self) -> None:
        """Take the server out of rotation: it gets no new requests until `set_version`."""
        self.withdrawn = True

    async def set_version(self, version: int) -> None:
        """Label the server's weights with this version, and put it back into rotation."""
        await self.backend.set_version_label(self, version)
        self.record_version(version)

    def record_version(self, version: int) -> None:
        """Record the version of a server that has its label already, and put it back into rotation."""
        self.version = version
        self.withdrawn = False
