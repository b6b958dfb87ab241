"""A client of a server for the processes that bring it weights. It needs only the server's address.

`ServerEngine`, in another process, also sends requests there. It knows which requests are under way, and waits for them
where that is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.rollout.http_client import HttpClient
from etude.rollout.server_backend import ServerBackend


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
        """Return a client of the server at this address."""
        fields = {"ranks": address.ranks, "version": address.version, "incarnation": address.incarnation}
        return cls(address.url, address.backend, key=address.key, **fields)

    @property
    def address(self) -> ServerAddress:
        """The facts about this server that another process needs."""
        return ServerAddress(self.url, self.backend, self.ranks, self.version, self._key, self.incarnation)

    def relocate(self, url: str) -> None:
        """Record that the server is another process from now on, at this URL."""
        self.url = self._client.url = url
        self.incarnation += 1

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post to any endpoint, and return the reply."""
        return await self._client.post(path, body)

    async def abort(self) -> None:
        """End all requests under way. Every waiting call returns its tokens so far, finished by `abort`."""
        await self.backend.abort(self._client)

    async def pause_for_update(self) -> None:
        """Pause between two tokens for new weights; requests under way stay."""
        await self.backend.pause_for_update(self._client)

    async def resume(self) -> None:
        """Continue the requests under way."""
        await self.backend.resume(self._client)

    async def drain(self) -> None:
        """Return at once: this client does not know the requests under way."""

    async def interrupt(self) -> None:
        """Return at once: this client does not know the requests under way."""

    def withdraw(self) -> None:
        """Take the server out of rotation: it gets no new requests until `set_version`."""
        self.withdrawn = True

    async def set_version(self, version: int) -> None:
        """Label the server's weights with this version, and put it back into rotation."""
        await self.backend.set_version_label(self._client, version)
        self.record_version(version)

    def record_version(self, version: int) -> None:
        """Record the version of a server that has its label already, and put it back into rotation."""
        self.version, self.withdrawn = version, False
