"""A server, as whoever brings weights to it sees it: from any process, by its address alone.

Who asks it for answers is another matter, and another process: `Server` is this and that. What is under way there, that
one knows, and has waited for it where it had to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.rollout.connection import Connection
from etude.rollout.dialect import Dialect

__all__ = ["Address", "Remote"]


@dataclass(frozen=True, slots=True)
class Address:
    """What another process needs to know of a server."""

    url: str
    dialect: Dialect
    ranks: int
    """How many processes of it hold a share of the weights."""
    version: int
    """The policy version of the weights it holds."""
    key: str = field(default="", repr=False)
    """What it asks for."""
    life: int = 0
    """How often it began anew: what was agreed on with it before, it does not know any more."""


class Remote:
    """One server."""

    def __init__(
        self, url: str, dialect: Dialect, *, ranks: int = 1, version: int = 0, key: str = "", life: int = 0
    ) -> None:
        """See `Address`."""
        self.url, self.dialect, self.ranks, self.version, self.life = url, dialect, ranks, version, life
        self.withdrawn = False
        self._key = key
        self._to = Connection(url, key=key)

    @classmethod
    def at(cls, address: Address) -> Remote:
        """The one at this address."""
        told = {"ranks": address.ranks, "version": address.version, "life": address.life}
        return cls(address.url, address.dialect, key=address.key, **told)

    @property
    def address(self) -> Address:
        """What another process needs to know of it."""
        return Address(self.url, self.dialect, self.ranks, self.version, self._key, self.life)

    def moves(self, url: str) -> None:
        """It is another process from now on, which is found here."""
        self.url = self._to.url = url
        self.life += 1

    async def close(self) -> None:
        """Let go of its connections."""
        await self._to.close()

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask any of its endpoints; returns what it says."""
        return await self._to.post(path, body)

    async def abort(self) -> None:
        """End all that is under way: every waiting call returns what it has, finished by `abort`."""
        await self.dialect.abort(self._to)

    async def resume(self) -> None:
        """Go on with what is under way."""
        await self.dialect.resume(self._to)

    async def drain(self) -> None:
        """Nothing is known here of what is under way there."""

    def withdraw(self) -> None:
        """Take it out of rotation: nothing new is asked of it until it is stamped."""
        self.withdrawn = True

    async def stamped(self, version: int) -> None:
        """It computes with the weights of this version from now on, and is in rotation."""
        await self.dialect.label(self._to, version)
        self.holds(version)

    def holds(self, version: int) -> None:
        """It does so already, and has been told: whoever brought it there says so."""
        self.version, self.withdrawn = version, False
