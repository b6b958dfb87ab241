"""How often, and how soon, something that ended although it should not is begun again. Pure: it is told the time."""

from __future__ import annotations

__all__ = ["Again"]

FIRST, LONGEST = 0.5, 30.0
"""Seconds before it is begun again: at first, twice as long each time, and never longer."""
MOST = 5
"""How often it is begun again in a row."""
LASTED = 60.0
"""Seconds of good work after which it is as if it had never ended."""


class Again:
    """One thing that is begun again, within bounds."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._since = 0.0

    def began(self, now: float) -> None:
        """It was begun."""
        self._since = now

    def ended(self, now: float) -> float | None:
        """It ended, and should not have: seconds until it is begun again; None where it is given up."""
        if now - self._since >= LASTED:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row > MOST:
            return None
        wait: float = min(FIRST * 2.0 ** (self._in_a_row - 1), LONGEST)
        return wait
