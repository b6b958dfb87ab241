"""The open work of a rollout queue: queued rollouts, leased attempts, and their deadlines. The caller passes the time
and writes the journal; the table holds open work only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, TypeAlias

from etude.store.queue.records import OWN_RUNNER, AttemptId
from etude.store.queue.rollout_limits import RolloutLimits, RolloutPurpose

FINISH_GRACE_S = 5.0
"""Seconds beyond its time limit, and at most that limit again, in which a runner may report a stopped attempt. Only the
runner knows how far the attempt came."""
MAX_STALE_DEADLINES = 256
"""Number of stale deadlines from which on they are removed, in addition to four per item of open work."""

Cause: TypeAlias = Literal["queue", "time", "silence"]


@dataclass(slots=True, eq=False)
class AttemptLease:
    """An attempt that a runner has for now."""

    runner: str
    limits: RolloutLimits
    since: float
    last_heartbeat: float
    """Time of the last heartbeat for this attempt."""


class Deadline(NamedTuple):
    """A time at which to check one limit."""

    when: float
    cause: Cause
    attempt_id: AttemptId
    """The attempt. For a deadline of the queue only its rollout counts."""
    since: float


class LeaseTable:
    """The queue in its order, the leases, and the deadlines of both."""

    def __init__(self) -> None:
        self._queues: dict[RolloutPurpose, OrderedDict[int, float]] = {"val": OrderedDict(), "train": OrderedDict()}
        """Queued rollouts by use, in the order of their assignment, with the time since which each has waited."""
        self.suspended: set[int] = set()
        """Rollouts that were queued in an earlier epoch; they wait until the run enqueues them again."""
        self.awaiting_owner: list[int] = []
        """Rollouts to queue again when the owner renews its lease, since an attempt met an infrastructure error."""
        self.leases: dict[AttemptId, AttemptLease] = {}
        self._deadlines: list[Deadline] = []

    @property
    def num_queued(self) -> int:
        """Number of queued rollouts."""
        return sum(map(len, self._queues.values()))

    def next_queued(self) -> int | None:
        """Return the rollout to assign next: the longest queued one of use `val`, else the longest queued one."""
        return next((next(iter(queue)) for queue in self._queues.values() if queue), None)

    def queued_since(self) -> float | None:
        """Return the time since which the oldest queued rollout has waited."""
        return min((next(iter(queue.values())) for queue in self._queues.values() if queue), default=None)

    def enqueue(self, rollout: int, use: RolloutPurpose, limits: RolloutLimits, now: float) -> None:
        """Add a rollout behind the queued ones of its use. For a rollout in the queue, its wait begins again."""
        self.suspended.discard(rollout)
        self._queues[use][rollout] = now
        if limits.queue_timeout_s is not None:
            self._schedule(Deadline(now + limits.queue_timeout_s, "queue", AttemptId(rollout, 0), now))

    def start_lease(self, key: AttemptId, runner: str, limits: RolloutLimits, now: float) -> None:
        """Lease an attempt to a runner. Its rollout leaves the queue. The run's own runner lives as long as the queue,
        and bounds its attempts itself."""
        self._dequeue(key.rollout)
        self.leases[key] = AttemptLease(runner, limits, now, now)
        if runner == OWN_RUNNER:
            return
        self._schedule(Deadline(now + limits.unresponsive_s, "silence", key, now))
        if limits.timeout_s is not None:
            self._schedule(Deadline(now + limits.timeout_s + min(limits.timeout_s, FINISH_GRACE_S), "time", key, now))

    def remove(self, rollout: int) -> None:
        """Remove a rollout that must no longer be executed."""
        self._dequeue(rollout)
        self.suspended.discard(rollout)
        if rollout in self.awaiting_owner:
            self.awaiting_owner.remove(rollout)

    def suspend_all(self) -> None:
        """Suspend all queued rollouts, and those of leased attempts, whose ends the caller has written."""
        self.suspended.update(*self._queues.values(), self.awaiting_owner, (key.rollout for key in self.leases))
        for queue in self._queues.values():
            queue.clear()
        self.awaiting_owner.clear()
        self.leases.clear()

    def record_heartbeat(self, key: AttemptId, now: float) -> None:
        """Record a heartbeat for an attempt."""
        if key in self.leases:
            self.leases[key].last_heartbeat = now

    def next_deadline(self) -> float | None:
        """Return the time of the next deadline."""
        return self._deadlines[0].when if self._deadlines else None

    def pop_due(self, now: float) -> Iterator[Deadline]:
        """Yield the limits that have passed. The caller ends the work; each limit is yielded once."""
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

    def _dequeue(self, rollout: int) -> None:
        for queue in self._queues.values():
            queue.pop(rollout, None)

    def _schedule(self, deadline: Deadline) -> None:
        heappush(self._deadlines, deadline)
        if len(self._deadlines) > MAX_STALE_DEADLINES + 4 * (self.num_queued + len(self.leases)):
            self._deadlines = [other for other in self._deadlines if self._is_current(other)]
            heapify(self._deadlines)

    def _is_current(self, deadline: Deadline) -> bool:
        """Return whether a deadline still concerns open work."""
        if deadline.cause == "queue":
            return any(queue.get(deadline.attempt_id.rollout) == deadline.since for queue in self._queues.values())
        return deadline.attempt_id in self.leases
