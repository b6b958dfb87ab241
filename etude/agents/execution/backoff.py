"""How often, and how soon, something that ended although it should not is begun again. Pure: it is told the time."""

from __future__ import annotations

__all__ = ["RestartBackoff"]

FIRST_DELAY, MAX_DELAY = 0.5, 30.0
"""Seconds before it is begun again: at first, twice as long each time, and never longer."""
MAX_RESTARTS = 5
"""How often it is begun again in a row."""
HEALTHY_AFTER = 60.0
"""Seconds of good work after which it is as if it had never ended."""


class RestartBackoff:
    """One thing that is begun again, within bounds."""

    def __init__(self) -> None:
        self._restarts = 0
        self._started_at = 0.0

    def started(self, now: float) -> None:
        """It was begun."""
        self._started_at = now

    def next_delay(self, now: float) -> float | None:
        """It ended, and should not have: seconds until it is begun again; None where it is given up."""
        if now - self._started_at >= HEALTHY_AFTER:
            self._restarts = 0
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            return None
        delay: float = min(FIRST_DELAY * 2.0 ** (self._restarts - 1), MAX_DELAY)
        return delay
