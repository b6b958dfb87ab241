"""The load of a server, in its own figures, and the number of requests that it should have.

More concurrent requests make more tokens a second until the memory for keys and values runs out. A server then preempts
half-written answers, and computes them once more later. `AdaptiveConcurrencyLimit` finds the number just below that. It
grows slowly while a server has room, and shrinks by a share as soon as it has none.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AdaptiveConcurrencyLimit", "ServerLoad"]

HIGH_USAGE = 0.95
"""The cache usage above which a server gets fewer requests."""
LOW_USAGE = 0.8
"""The cache usage below which it gets more."""
SHRINK_FACTOR = 0.75
GROWTH_SHARE = 1 / 16


@dataclass(frozen=True)
class ServerLoad:
    """The load that a server reports."""

    running: int
    waiting: int
    kv_cache_usage: float
    """The share of the memory for keys and values that is in use."""
    preemptions: int
    """The count of preempted answers since the server started."""


class AdaptiveConcurrencyLimit:
    """The number of requests that one server should have at once."""

    def __init__(self, max_limit: int) -> None:
        self.max_limit = self.limit = max_limit
        self._preemptions: int | None = None

    def update(self, load: ServerLoad) -> int:
        """Take a server's load into account, and return the new limit."""
        previous, self._preemptions = self._preemptions, load.preemptions
        preempted = previous is not None and load.preemptions > previous
        if preempted or (load.waiting and load.kv_cache_usage > HIGH_USAGE):
            running = load.running or self.limit  # 0 while all of them are preempted
            self.limit = max(1, min(self.limit, int(running * SHRINK_FACTOR)))
        elif load.kv_cache_usage < LOW_USAGE and load.running + load.waiting >= self.limit * LOW_USAGE:
            self.limit = min(self.max_limit, self.limit + max(1, int(self.limit * GROWTH_SHARE)))
        return self.limit
