"""The adapters that a server holds: one for each policy version that a rollout may still use.

    policy-v3  policy-v4  policy-v5        a rollout draws all its tokens by one of them

A publish adds the newest adapter and unloads the oldest by name. Neither disturbs requests: each draws by the adapter
that it names, from its first token to its last.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import EngineError
from etude.observe import get_logger

if TYPE_CHECKING:
    from etude.rollout.server_client import ServerClient

PREFIX = "policy-v"


@dataclass(frozen=True)
class AdapterSpec:
    """The adapters that a server holds, beside the weights that it began with."""

    held: int
    """The number that it holds at a time."""
    rank: int
    """The rank (inner width) of the widest one."""
    modules: tuple[str, ...] = ()
    """The last parts of the names of the layers that have one."""


def adapter_name(version: int) -> str:
    """Return a server's name for the adapter of a policy version."""
    return f"{PREFIX}{version}"


def adapter_count(max_staleness: int) -> int:
    """Return the number of adapters that a server must hold at a time.

    When version n is published, the open rollouts have versions n - `max_staleness` to n - 1, because step n has been
    admitted and later steps train on nothing older. One more is held, so that a late request finds its adapter. Without
    staleness nothing is sampled during a publish, and one is enough.
    """
    return max_staleness + 2 if max_staleness else 1


class HeldAdapters:
    """The adapters of one server, by version. Used on the servers' event loop.

    `hold` loads and removes adapters until the server holds those that it should. This includes a server that was
    restarted, and one that dropped an adapter by itself.
    """

    def __init__(self, server: ServerClient) -> None:
        self._backend = server.backend
        self._server = server
        self._loaded: dict[int, Path] = {}
        """The adapters that this run has loaded into the server, with their directories."""
        self._salts: dict[int, str] = {}
        """A text for each adapter that the server should hold, which no other adapter has."""

    def forget(self) -> None:
        """Record that the server is another process from now on, which has no adapter of this run."""
        self._loaded.clear()
        self._salts.clear()

    def salt(self, version: int) -> str:
        """Return the text that separates cached keys and values of this version from all others. Refuse a version
        that the server does not hold."""
        if version not in self._salts:
            held = ", ".join(map(str, sorted(self._salts))) or "none"
            raise EngineError(
                f"Policy version {version} was asked for, and the server at {self._server.url} holds these: {held}. A "
                "rollout that uses an older one should have ended."
            )
        return self._salts[version]

    async def hold(self, wanted: Mapping[int, Path]) -> None:
        """Have the server hold exactly these adapters of policy versions, and check that it does."""
        present = await self._backend.list_adapters(self._server)
        self._notice_lost(present)
        for name in sorted(name for name in present if name.startswith(PREFIX)):
            if name not in map(adapter_name, self._loaded):
                await self._backend.unload_adapter(self._server, name)  # an earlier run left it
        for version in [version for version, path in self._loaded.items() if wanted.get(version) != path]:
            await self._backend.unload_adapter(self._server, adapter_name(version))
            del self._loaded[version]
        # Only now: until it is unloaded, an earlier adapter of the same name fills the cache of the salt.
        kept = {version: salt for version, salt in self._salts.items() if version in self._loaded}
        self._salts = {version: kept.get(version) or secrets.token_hex(8) for version in wanted}
        for version in sorted(wanted.keys() - self._loaded.keys()):
            await self._backend.load_adapter(self._server, adapter_name(version), wanted[version].resolve())
            self._loaded[version] = wanted[version]
        names = {adapter_name(version) for version in wanted}
        if missing := sorted(names - await self._backend.list_adapters(self._server)):
            raise EngineError(
                f"The server at {self._server.url} was given {len(wanted)} adapters and does not have "
                f"{', '.join(missing)}: it drops adapters by itself. {self._backend.adapter_remedy(len(wanted))}"
            )

    def _notice_lost(self, present: set[str]) -> None:
        """Count adapters that the server has dropped as not loaded, so that they are loaded again, and say so."""
        lost = [version for version in self._loaded if adapter_name(version) not in present]
        for version in lost:
            del self._loaded[version]
        if lost:
            get_logger("rollout").warning(
                "The server at %s has dropped %s, which a rollout may need. It is loaded again from its files.",
                self._server.url,
                ", ".join(map(adapter_name, lost)),
            )
