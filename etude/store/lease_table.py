"""What waits and what runs at a desk, and when somebody must look after it. No clock and no journal of its own: it is
told the time, and keeps no more than the work that is open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, TypeAlias

from etude.store.rollout_limits import RolloutLimits
from etude.store.rollout_queue import AttemptId

__all__ = ["AttemptLease", "Deadline", "LeaseTable"]

FINISH_GRACE_S = 5.0
"""Seconds beyond its time, at most as much again, in which a runner may hand in an attempt that it has stopped: it
alone knows how far the attempt came."""
MAX_STALE_DEADLINES = 256
"""How many reminders that have become idle are kept at least, before they are cleared away."""

Cause: TypeAlias = Literal["queue", "time", "silence"]


@dataclass(slots=True, eq=False)
class AttemptLease:
    """An attempt that is somebody's for now."""

    runner: str
    limits: RolloutLimits
    since: float
    last_heartbeat: float
    """When its runner last spoke of it."""


class Deadline(NamedTuple):
    """A reminder: at this time, look whether this limit was passed."""

    when: float
    cause: Cause
    attempt_id: AttemptId
    """For the queue, the attempt is how often it had been tried."""
    since: float


class LeaseTable:
    """The queue in its order, the leases, and the reminders of both."""

    def __init__(self) -> None:
        self.queue: OrderedDict[int, float] = OrderedDict()
        """Rollouts, and since when each has waited."""
        self.suspended: set[int] = set()
        """Queued in an earlier life of the desk's keeper: they wait until they are asked for again."""
        self.awaiting_owner: list[int] = []
        """To be queued again when the keeper is next heard: something was wrong with what it serves."""
        self.leases: dict[AttemptId, AttemptLease] = {}
        self._deadlines: list[Deadline] = []

    def enqueue(self, rollout: int, limits: RolloutLimits, now: float) -> None:
        """A rollout joins the queue at its end; one that is there begins to wait anew."""
        self.suspended.discard(rollout)
        self.queue[rollout] = now
        if limits.queue_timeout_s is not None:
            self._schedule(Deadline(now + limits.queue_timeout_s, "queue", AttemptId(rollout, 0), now))

    def start_lease(self, key: AttemptId, runner: str, limits: RolloutLimits, now: float) -> None:
        """A runner has this attempt from now on."""
        self.leases[key] = AttemptLease(runner, limits, now, now)
        self._schedule(Deadline(now + limits.unresponsive_s, "silence", key, now))
        if limits.timeout_s is not None:
            self._schedule(Deadline(now + limits.timeout_s + min(limits.timeout_s, FINISH_GRACE_S), "time", key, now))

    def remove(self, rollout: int) -> None:
        """A rollout is not to be played any more."""
        self.queue.pop(rollout, None)
        self.suspended.discard(rollout)
        if rollout in self.awaiting_owner:
            self.awaiting_owner.remove(rollout)

    def suspend_all(self) -> None:
        """All that waits sleeps; and so does what was under way, whose ends are written."""
        self.suspended.update(self.queue, self.awaiting_owner, (key.rollout for key in self.leases))
        self.queue.clear()
        self.awaiting_owner.clear()
        self.leases.clear()

    def record_heartbeat(self, key: AttemptId, now: float) -> None:
        """The runner of an attempt has spoken of it."""
        if key in self.leases:
            self.leases[key].last_heartbeat = now

    def extend_leases(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        for lease in self.leases.values():
            lease.last_heartbeat += seconds

    def next_deadline(self) -> float | None:
        """When somebody must look again."""
        return self._deadlines[0].when if self._deadlines else None

    def pop_due(self, now: float) -> Iterator[Deadline]:
        """The limits that were passed by now. Whoever asks ends the work: it is not reminded again."""
        while self._deadlines and self._deadlines[0].when <= now:
            deadline = heappop(self._deadlines)
            if not self._is_current(deadline):
                continue
            if deadline.cause == "silence":
                lease = self.leases[deadline.attempt_id]
                if (later := lease.last_heartbeat + lease.limits.unresponsive_s) > now:
                    heappush(self._deadlines, deadline._replace(when=later))
                    continue
            yield deadline

    def _schedule(self, deadline: Deadline) -> None:
        heappush(self._deadlines, deadline)
        if len(self._deadlines) > MAX_STALE_DEADLINES + 4 * (len(self.queue) + len(self.leases)):
            self._deadlines = [other for other in self._deadlines if self._is_current(other)]
            heapify(self._deadlines)

    def _is_current(self, deadline: Deadline) -> bool:
        """Whether what a reminder speaks of is still so."""
        if deadline.cause == "queue":
            return self.queue.get(deadline.attempt_id.rollout) == deadline.since
        return deadline.attempt_id in self.leases
