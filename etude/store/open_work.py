"""What waits and what runs at a desk, and when somebody must look after it. No clock and no journal of its own: it is
told the time, and keeps no more than the work that is open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, TypeAlias

from etude.store.desk import Key
from etude.store.limits import Limits

__all__ = ["Due", "Lease", "OpenWork"]

HAND_IN_S = 5.0
"""Seconds beyond its time, at most as much again, in which a runner may hand in an attempt that it has stopped: it
alone knows how far the attempt came."""
SPARE = 256
"""How many reminders that have become idle are kept at least, before they are cleared away."""

Cause: TypeAlias = Literal["queue", "time", "silence"]


@dataclass(slots=True, eq=False)
class Lease:
    """An attempt that is somebody's for now."""

    runner: str
    limits: Limits
    since: float
    heard: float
    """When its runner last spoke of it."""


class Due(NamedTuple):
    """A reminder: at this time, look whether this limit was passed."""

    when: float
    cause: Cause
    key: Key
    """For the queue, the attempt is how often it had been tried."""
    since: float


class OpenWork:
    """The queue in its order, the leases, and the reminders of both."""

    def __init__(self) -> None:
        self.queue: OrderedDict[int, float] = OrderedDict()
        """Rollouts, and since when each has waited."""
        self.asleep: set[int] = set()
        """Queued in an earlier life of the desk's keeper: they wait until they are asked for again."""
        self.held: list[int] = []
        """To be queued again when the keeper is next heard: something was wrong with what it serves."""
        self.leases: dict[Key, Lease] = {}
        self._due: list[Due] = []

    def wait(self, rollout: int, limits: Limits, now: float) -> None:
        """A rollout joins the queue at its end; one that is there begins to wait anew."""
        self.asleep.discard(rollout)
        self.queue[rollout] = now
        if limits.queue_timeout_s is not None:
            self._remind(Due(now + limits.queue_timeout_s, "queue", Key(rollout, 0), now))

    def lend(self, key: Key, runner: str, limits: Limits, now: float) -> None:
        """A runner has this attempt from now on."""
        self.leases[key] = Lease(runner, limits, now, now)
        self._remind(Due(now + limits.unresponsive_s, "silence", key, now))
        if limits.timeout_s is not None:
            self._remind(Due(now + limits.timeout_s + min(limits.timeout_s, HAND_IN_S), "time", key, now))

    def leave(self, rollout: int) -> None:
        """A rollout is not to be played any more."""
        self.queue.pop(rollout, None)
        self.asleep.discard(rollout)
        if rollout in self.held:
            self.held.remove(rollout)

    def sleep(self) -> None:
        """All that waits sleeps; and so does what was under way, whose ends are written."""
        self.asleep.update(self.queue, self.held, (key.rollout for key in self.leases))
        self.queue.clear()
        self.held.clear()
        self.leases.clear()

    def heard(self, key: Key, now: float) -> None:
        """The runner of an attempt has spoken of it."""
        if key in self.leases:
            self.leases[key].heard = now

    def forgive(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        for lease in self.leases.values():
            lease.heard += seconds

    def next_due(self) -> float | None:
        """When somebody must look again."""
        return self._due[0].when if self._due else None

    def due(self, now: float) -> Iterator[Due]:
        """The limits that were passed by now. Whoever asks ends the work: it is not reminded again."""
        while self._due and self._due[0].when <= now:
            due = heappop(self._due)
            if not self._stands(due):
                continue
            if due.cause == "silence":
                lease = self.leases[due.key]
                if (later := lease.heard + lease.limits.unresponsive_s) > now:
                    heappush(self._due, due._replace(when=later))
                    continue
            yield due

    def _remind(self, due: Due) -> None:
        heappush(self._due, due)
        if len(self._due) > SPARE + 4 * (len(self.queue) + len(self.leases)):
            self._due = [each for each in self._due if self._stands(each)]
            heapify(self._due)

    def _stands(self, due: Due) -> bool:
        """Whether what a reminder speaks of is still so."""
        if due.cause == "queue":
            return self.queue.get(due.key.rollout) == due.since
        return due.key in self.leases
