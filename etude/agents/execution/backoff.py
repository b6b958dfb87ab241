"""The number of restarts of something that ended unexpectedly, and the delay before each. Pure: the caller passes the
time."""

from __future__ import annotations

FIRST_DELAY, MAX_DELAY = 0.5, 30.0
"""Seconds before the first restart; the delay doubles each time, up to the maximum."""
MAX_RESTARTS = 5
"""The most restarts in a row."""
HEALTHY_AFTER = 60.0
"""Seconds of operation after which the count of restarts begins at 0 again."""


class RestartBackoff:
    """The restarts of one process or thread."""

    def __init__(self) -> None:
        self._restarts = 0
        self._started_at = 0.0

    def started(self, now: float) -> None:
        """Note a start."""
        self._started_at = now

    def next_delay(self, now: float) -> float | None:
        """Note an unexpected end; return the seconds until the restart, or None after too many restarts."""
        if now - self._started_at >= HEALTHY_AFTER:
            self._restarts = 0
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            return None
        delay: float = min(FIRST_DELAY * 2.0 ** (self._restarts - 1), MAX_DELAY)
        return delay
