"""HTTP to one server, on one event loop: asked, streamed from, and every failure a sentence.

An answer that the server refuses is the caller's mistake (`DataError`); anything else that goes wrong is the server's
(`EngineError`), and `AwayError` where it was not reached or broke off, so that another may be asked. The key that it is
sent is in none of them.
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

__all__ = ["AbsentError", "AwayError", "Connection"]

CONNECT = 10.0
"""Seconds to reach a server."""
SHOWN = 400
"""Characters of what a server says that an error repeats."""
REFUSED = (400, 413, 422)
KEYLESS = (401, 403)
_BETWEEN = re.compile(rb"\r?\n\r?\n")


class AwayError(EngineError):
    """A server that cannot be reached, or broke off in the middle."""


class AbsentError(EngineError):
    """A server that knows nothing of what it was asked for."""


class Connection:
    """One server. `silence` is how many seconds it may say nothing while it owes an answer; `key`, what it asks for."""

    def __init__(self, url: str, silence: float = 600.0, *, key: str = "") -> None:
        self.url, self._key, self._silence = url.rstrip("/"), key, silence
        self._client = self._fresh()

    async def close(self) -> None:
        """Let go of it."""
        await self._client.aclose()

    async def cut(self) -> None:
        """Break off whatever is asked now, as if the server had; it may be asked anew."""
        client, self._client = self._client, self._fresh()
        await client.aclose()

    def _fresh(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
        return httpx2.AsyncClient(
            limits=limits,
            timeout=httpx2.Timeout(self._silence, connect=CONNECT),
            trust_env=False,
            headers={"authorization": f"Bearer {self._key}"} if self._key else {},
        )

    async def get(self, path: str, *, within: float | None = None) -> str:
        """What is there."""
        return await self._ask("GET", path, None, within)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, within: float | None = None) -> Any:
        """Ask for something to be done; what the server says of it, as data or in words; None where that is nothing."""
        said = await self._ask("POST", path, {} if body is None else body, within)
        try:
            return json.loads(said) if said.strip() else None
        except ValueError:
            return said

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Ask for something that comes piece by piece. Closing the iteration tells the server to stop."""
        async with self._asked("POST", path, body, None) as response:
            held = bytearray()
            try:
                async for chunk in response.aiter_bytes():
                    held += chunk
                    begin = 0
                    for end in _BETWEEN.finditer(held):
                        event, begin = bytes(held[begin : end.start()]), end.end()
                        data = event.removeprefix(b"data:").strip()
                        if data and data != b"[DONE]":
                            yield self._object(data)
                    del held[:begin]
            except httpx2.HTTPError as error:
                raise self._away(error) from error

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, within: float | None) -> str:
        async with self._asked(method, path, body, within) as response:
            try:
                return (await response.aread()).decode(errors="replace")
            except httpx2.HTTPError as error:
                raise self._away(error) from error

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None, within: float | None
    ) -> AsyncIterator[httpx2.Response]:
        timeout = self._client.timeout if within is None else httpx2.Timeout(within)
        request = self._client.build_request(method, f"{self.url}{path}", json=body, timeout=timeout)
        try:
            response = await self._client.send(request, stream=True)
        except httpx2.HTTPError as error:
            raise self._away(error) from error
        try:
            if response.status_code >= 400:
                said = self._shown((await response.aread()).decode(errors="replace"))
                told = f"The server at {self.url} answered {response.status_code} to {path}: {said}"
                if response.status_code in KEYLESS:
                    told += " It wants another key: name the variable that holds it with `rollout.key_from`."
                if response.status_code == 404:
                    raise AbsentError(told)
                raise DataError(told) if response.status_code in REFUSED else EngineError(told)
            yield response
        except httpx2.HTTPError as error:
            raise self._away(error) from error
        finally:
            await asyncio.shield(response.aclose())

    def _object(self, data: bytes) -> dict[str, Any]:
        told = self._read(data)
        if not isinstance(told, dict):
            raise EngineError(f"The server at {self.url} answered what is no object: {self._shown(str(told))}")
        if told.get("error"):
            raise EngineError(f"The server at {self.url} says: {self._shown(str(told['error']))}")
        return told

    def _read(self, data: str | bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            said = data.decode(errors="replace") if isinstance(data, bytes) else data
            raise EngineError(f"The server at {self.url} answered what is not JSON: {self._shown(said)!r}") from error

    def _shown(self, said: str) -> str:
        """What an error may repeat."""
        return (said.replace(self._key, MASK) if self._key else said)[:SHOWN]

    def _away(self, error: Exception) -> AwayError:
        return AwayError(f"The server at {self.url} could not be asked ({str(error) or type(error).__name__}).")
