"""Waits for an event, for tests that a slow machine must not fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], within: float = 20.0) -> None:
    """Wait until a condition holds, beside other coroutines."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.002)


def blocked_until(condition: Callable[[], object], within: float = 20.0) -> None:
    """Wait until a condition holds, in this thread."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, f"it did not come within {within:g} s"
        time.sleep(0.002)
