"""The use of the servers' slots between two reports: the share in use, and requests that were refused."""

from __future__ import annotations

import time
from collections.abc import Callable

from etude.observe import Mean, Metric, Sum, get_logger

STARVED_SHARE = 0.5
"""The share of slots in use under which a report names it."""


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
        self._running, self._slots, self._since = running, slots, now

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
