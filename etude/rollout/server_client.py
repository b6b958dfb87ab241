"""A server, as whoever brings weights to it sees it: from any process, by its address alone.

Who asks it for answers is another matter, and another process: `ServerEngine` is this and that. What is under way
there, that one knows, and has waited for it where it had to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.rollout.http_client import HttpClient
from etude.rollout.server_backend import ServerBackend

__all__ = ["ServerAddress", "ServerClient"]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """What another process needs to know of a server."""

    url: str
    backend: ServerBackend
    ranks: int
    """How many processes of it hold a share of the weights."""
    version: int
    """The policy version of the weights it holds."""
    key: str = field(default="", repr=False)
    """What it asks for."""
    incarnation: int = 0
    """How often it began anew: what was agreed on with it before, it does not know any more."""


class ServerClient:
    """One server."""

    def __init__(
        self, url: str, backend: ServerBackend, *, ranks: int = 1, version: int = 0, key: str = "", incarnation: int = 0
    ) -> None:
        """See `ServerAddress`."""
        self.url, self.backend, self.ranks, self.version, self.incarnation = url, backend, ranks, version, incarnation
        self.withdrawn = False
        self._key = key
        self._client = HttpClient(url, key=key)

    @classmethod
    def from_address(cls, address: ServerAddress) -> ServerClient:
        """The one at this address."""
        fields = {"ranks": address.ranks, "version": address.version, "incarnation": address.incarnation}
        return cls(address.url, address.backend, key=address.key, **fields)

    @property
    def address(self) -> ServerAddress:
        """What another process needs to know of it."""
        return ServerAddress(self.url, self.backend, self.ranks, self.version, self._key, self.incarnation)

    def relocate(self, url: str) -> None:
        """It is another process from now on, which is found here."""
        self.url = self._client.url = url
        self.incarnation += 1

    async def close(self) -> None:
        """Let go of its connections."""
        await self._client.close()

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask any of its endpoints; returns what it says."""
        return await self._client.post(path, body)

    async def abort(self) -> None:
        """End all that is under way: every waiting call returns what it has, finished by `abort`."""
        await self.backend.abort(self._client)

    async def resume(self) -> None:
        """Go on with what is under way."""
        await self.backend.resume(self._client)

    async def drain(self) -> None:
        """Nothing is known here of what is under way there."""

    def withdraw(self) -> None:
        """Take it out of rotation: nothing new is asked of it until it is stamped."""
        self.withdrawn = True

    async def set_version(self, version: int) -> None:
        """It computes with the weights of this version from now on, and is in rotation."""
        await self.backend.set_version_label(self._client, version)
        self.record_version(version)

    def record_version(self, version: int) -> None:
        """It does so already, and has been told: whoever brought it there says so."""
        self.version, self.withdrawn = version, False
