"""HTTP to one server, on one event loop: asked, streamed from, and every failure a sentence.

An answer that the server refuses is the caller's mistake (`DataError`); anything else that goes wrong is the server's
(`EngineError`), and `ServerUnreachableError` where it was not reached or broke off, so that another may be asked. The
key that it is sent is in none of them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from etude.config.secrets import MASK
from etude.errors import DataError, EngineError

__all__ = ["EndpointNotFoundError", "HttpClient", "ServerUnreachableError"]

CONNECT_TIMEOUT = 10.0
"""Seconds to reach a server."""
MAX_ERROR_CHARACTERS = 400
"""Characters of what a server says that an error repeats."""
CLIENT_ERROR_CODES = (400, 413, 422)
AUTH_ERROR_CODES = (401, 403)
_EVENT_SEPARATOR = re.compile(rb"\r?\n\r?\n")


class ServerUnreachableError(EngineError):
    """A server that cannot be reached, or broke off in the middle."""


class EndpointNotFoundError(EngineError):
    """A server that knows nothing of what it was asked for."""


class HttpClient:
    """One server. `silence` is how many seconds it may say nothing while it owes an answer; `key`, what it asks for."""

    def __init__(self, url: str, read_timeout: float = 600.0, *, key: str = "") -> None:
        self.url, self._key, self._read_timeout = url.rstrip("/"), key, read_timeout
        self._client = self._new_client()

    async def close(self) -> None:
        """Let go of it."""
        await self._client.aclose()

    async def disconnect(self) -> None:
        """Break off whatever is asked now, as if the server had; it may be asked anew."""
        client, self._client = self._client, self._new_client()
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
        """What is there."""
        return await self._request("GET", path, None, timeout)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> Any:
        """Ask for something to be done; what the server says of it, as data or in words; None where that is nothing."""
        text = await self._request("POST", path, {} if body is None else body, timeout)
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return text

    async def stream_events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Ask for something that comes piece by piece. Closing the iteration tells the server to stop."""
        async with self._open("POST", path, body, None) as response:
            buffer = bytearray()
            try:
                async for chunk in response.aiter_bytes():
                    buffer += chunk
                    start = 0
                    for end in _EVENT_SEPARATOR.finditer(buffer):
                        event, start = bytes(buffer[start : end.start()]), end.end()
                        data = event.removeprefix(b"data:").strip()
                        if data and data != b"[DONE]":
                            yield self._parse_event(data)
                    del buffer[:start]
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
                    message += " It wants another key: name the variable that holds it with `rollout.api_key_env`."
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
            raise EngineError(f"The server at {self.url} answered what is no object: {self._redact(str(event))}")
        if event.get("error"):
            raise EngineError(f"The server at {self.url} says: {self._redact(str(event['error']))}")
        return event

    def _parse_json(self, data: str | bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            text = data.decode(errors="replace") if isinstance(data, bytes) else data
            raise EngineError(f"The server at {self.url} answered what is not JSON: {self._redact(text)!r}") from error

    def _redact(self, text: str) -> str:
        """What an error may repeat."""
        return (text.replace(self._key, MASK) if self._key else text)[:MAX_ERROR_CHARACTERS]

    def _unreachable(self, error: Exception) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"The server at {self.url} could not be asked ({str(error) or type(error).__name__})."
        )
