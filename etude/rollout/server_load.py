"""How much a server has to do, in its own figures, and how much it should be given.

More requests at once make more tokens a second until memory for keys and values runs out: then a server takes answers
that are half written out of its memory, to compute them once more later. `AdaptiveConcurrencyLimit` finds the number
below that: it grows a little while a server has room, and shrinks by a share as soon as it has not.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AdaptiveConcurrencyLimit", "ServerLoad"]

HIGH_USAGE = 0.95
"""Share of the memory for keys and values beyond which a server is given less."""
LOW_USAGE = 0.8
"""Share below which it is given more."""
SHRINK_FACTOR = 0.75
GROWTH_SHARE = 1 / 16


@dataclass(frozen=True)
class ServerLoad:
    """What a server says of itself."""

    running: int
    waiting: int
    kv_cache_usage: float
    """Share of the memory for keys and values that is in use."""
    preemptions: int
    """How many answers were put off since the server started, half written."""


class AdaptiveConcurrencyLimit:
    """How many requests one server is to have at once."""

    def __init__(self, max_limit: int) -> None:
        self.max_limit = self.limit = max_limit
        self._preemptions: int | None = None

    def update(self, load: ServerLoad) -> int:
        """Take notice of a server's figures; returns the new number."""
        previous, self._preemptions = self._preemptions, load.preemptions
        preempted = previous is not None and load.preemptions > previous
        if preempted or (load.waiting and load.kv_cache_usage > HIGH_USAGE):
            running = load.running or self.limit  # none may run at the moment that all were put off
            self.limit = max(1, min(self.limit, int(running * SHRINK_FACTOR)))
        elif load.kv_cache_usage < LOW_USAGE and load.running + load.waiting >= self.limit * LOW_USAGE:
            self.limit = min(self.max_limit, self.limit + max(1, int(self.limit * GROWTH_SHARE)))
        return self.limit
