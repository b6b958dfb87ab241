"""A clock that stands still until a test moves it."""

from __future__ import annotations


class Clock:
    """Call it for the time; `wait` lets time pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
