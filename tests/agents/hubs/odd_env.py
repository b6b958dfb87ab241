"""A factory of TRL for tests, whose tools do what an environment must not do."""

from __future__ import annotations

import os
import sys
import time


class Odd:
    """A counter, and several ways to fail."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.reward = 0.0

    def reset(self, prompt: object, seed: int = 0) -> str | None:
        """Begin with a seed."""
        self.count += seed
        return f"={self.count}" if seed else None

    def add(self, number: int, times: int = 1) -> str:
        """Add a number.

        Args:
            number: the number
            times: how often
        """
        self.count += number * times
        self.reward = self.count / 10
        return str(self.count)

    def raise_error(self) -> str:
        """Fail."""
        raise ValueError("not\ntoday")

    def flood(self) -> str:
        """Print two megabytes."""
        print("x" * (2 << 20))
        sys.stderr.write("y" * (2 << 20))
        return input() if sys.stdin.readable() and sys.stdin.read() else "flooded"

    def hang(self) -> str:
        """Never return."""
        time.sleep(3600)
        return ""

    def spin(self) -> str:
        """Never return, and compute."""
        while True:
            pass

    def grow(self, megabytes: int) -> int:
        """Take memory."""
        return len(bytearray(megabytes << 20)) >> 20

    def die(self) -> str:
        """End the process."""
        print("dying now", file=sys.stderr, flush=True)
        os._exit(7)

    def get_reward(self) -> float:
        """Return what was counted; no number from a hundred on."""
        return float("nan") if self.count >= 100 else self.reward
