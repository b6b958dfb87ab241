"""The load of a server, in its own figures, the number of requests that it should have, and the use of its slots.

More concurrent requests make more tokens a second until the memory for keys and values runs out. A server then preempts
half-written answers, and computes them once more later. `AdaptiveConcurrencyLimit` finds the number just below that:

    preempted answers, or requests that wait while the cache is full     three quarters of the running requests
    requests that wait at several checks, while as many run at each      the running requests: the server has a limit
    nothing waits, the cache has room, nearly all slots are in use       a sixteenth more
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from etude.observe import Mean, Metric, Sum, get_logger

MAX_LIMIT, START_LIMIT = 1024, 128
"""The most requests of a server without a limit of its own in the options, and the number to begin with."""
HIGH_USAGE = 0.95
"""The cache usage above which a server gets fewer requests."""
LOW_USAGE = 0.8
"""The cache usage below which it gets more."""
SHRINK_FACTOR = 0.75
GROWTH_SHARE = 1 / 16
QUEUE_CHECKS = 5
"""Checks in a row at which requests wait and equally many run, until that counts as a limit of the server. While a
server reads the prompts of a burst, more and more run."""
SETTLE_CHECKS = 10
"""Checks after a publish at which preemptions do not count: the publish itself preempted the running answers."""
HOLD_CHECKS = 60
"""Checks after that until the server is tried with more requests again."""
STARVED_SHARE = 0.5
"""The share of slots in use under which a report names it."""


@dataclass(frozen=True)
class ServerLoad:
    """The load that a server reports."""

    running: int
    waiting: int
    kv_cache_usage: float
    """The share of the memory for keys and values that is in use."""
    preemptions: int
    """The count of preempted answers since the server started."""
    retracted: int = 0
    """The number of answers that were preempted before the last report of a server that does not count them from its
    start on."""


class AdaptiveConcurrencyLimit:
    """The number of requests that one server should have at once."""

    def __init__(self, max_limit: int | None) -> None:
        """max_limit: the limit to begin with, which it never exceeds. With None it begins at `START_LIMIT`, and the
        server's load decides, up to `MAX_LIMIT`."""
        self.max_limit = MAX_LIMIT if max_limit is None else max_limit
        self.limit = START_LIMIT if max_limit is None else max_limit
        self.reason = ""
        """The cause of the last change, with its figures."""
        self._preemptions: int | None = None
        self._retracted = self._queue_checks = self._hold_checks = self._settle_checks = self._running = 0
        self._usage = -1.0

    def on_publish(self) -> None:
        """Count no preemptions for some checks."""
        self._settle_checks = SETTLE_CHECKS

    def update(self, load: ServerLoad) -> int:
        """Take a server's load into account, and return the new limit."""
        previous = self._preemptions
        self._preemptions = load.preemptions
        preempted = 0 if previous is None else max(load.preemptions - previous, 0)
        if load.retracted != self._retracted and (load.running or load.waiting):  # else an old report
            preempted += load.retracted
        if self._settle_checks:
            preempted = 0
            self._settle_checks -= 1
        # Figures that are all the same are those of one long step.
        has_stepped = load.kv_cache_usage != self._usage
        self._retracted = load.retracted
        self._usage = load.kv_cache_usage
        is_stuck = load.waiting > 0 and load.running == self._running > 0 and has_stepped
        self._queue_checks = self._queue_checks + 1 if is_stuck else 0
        self._running = load.running
        self._hold_checks = max(self._hold_checks - 1, 0)
        before, running = self.limit, load.running or self.limit  # 0 while all of them are preempted
        has_room, cause = load.kv_cache_usage < LOW_USAGE, f"{load.waiting} wait"
        if preempted or (load.waiting and load.kv_cache_usage > HIGH_USAGE):
            self.limit = max(1, min(self.limit, int(running * SHRINK_FACTOR)))
            cause = f"{preempted} were preempted, {cause}"
        elif self._queue_checks >= QUEUE_CHECKS:
            self.limit = min(self.limit, running)
            self._queue_checks = 0
            self._hold_checks = HOLD_CHECKS
        elif has_room and not (load.waiting or self._hold_checks) and load.running >= self.limit * LOW_USAGE:
            self.limit = min(self.max_limit, self.limit + max(1, int(self.limit * GROWTH_SHARE)))
        if self.limit != before:
            self.reason = f"{load.running} run, {cause}, {load.kv_cache_usage:.0%} of its cache is in use"
        return self.limit


class SlotUsage:
    """Counts slots and requests over the time in which requests run. A report is made once a step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running = self._slots = 0
        self._since = clock()
        self._used_s = self._slot_s = self._seconds = 0.0
        self.refused = 0
        """The number of requests that found the queue full."""
        self._was_starved = False

    def count(self, running: int, slots: int) -> None:
        """Record that so many requests run from now on, at servers with so many slots."""
        now = self._clock()
        if self._running:
            seconds = now - self._since
            self._seconds += seconds
            self._used_s += seconds * self._running
            self._slot_s += seconds * max(self._slots, self._running)
        self._running = running
        self._slots = slots
        self._since = now

    def pop_metrics(self, max_waiting: int) -> dict[str, Metric]:
        """Return the metrics since the last call. Log it if slots were free for want of requests, or a queue was full.

        The first of several reports with free slots in a row is logged.
        """
        self.count(self._running, self._slots)
        share = self._used_s / self._slot_s if self._slot_s else 1.0
        if share < STARVED_SHARE and not self._was_starved:
            get_logger("rollout").info(
                "%.0f of the servers' %.0f slots were in use on average while they sampled: too few requests came. "
                "More tasks at a time, a larger `max_staleness`, or fewer servers would use more of them.",
                self._used_s / self._seconds,
                self._slot_s / self._seconds,
            )
        if self.refused:
            get_logger("rollout").warning(
                "%d requests were refused, because `rollout.max_waiting` = %d others waited for a server.",
                self.refused,
                max_waiting,
            )
        self._was_starved = share < STARVED_SHARE
        metrics: dict[str, Metric] = {"engine/requests_refused": Sum.of(self.refused)}
        if self._slot_s:
            metrics["engine/slot_usage"] = Mean.over(self._used_s, self._slot_s)
        self._used_s = self._slot_s = self._seconds = 0.0
        self.refused = 0
        return metrics


class BusyTime:
    """The time in which at least one request runs. Used on one event loop."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since = 0.0
        self._active = 0

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count a request as running inside this context."""
        if not self._active:
            self._since = time.perf_counter()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._seconds += time.perf_counter() - self._since

    def pop(self) -> float:
        """Return the seconds since the last call."""
        now = time.perf_counter()
        if self._active:
            self._seconds += now - self._since
            self._since = now
        seconds = self._seconds
        self._seconds = 0.0
        return seconds
