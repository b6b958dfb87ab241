"""Waits for an event, for tests that a slow machine must not fail."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from etude.running_time import _clock, running_time

T = TypeVar("T")


async def until(condition: Callable[[], object], within: float = 20.0) -> None:
    """Wait until a condition holds, beside other coroutines."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.002)


def blocked_until(condition: Callable[[], T], within: float = 30.0) -> T:
    """Wait in this thread until a condition holds, and return its value."""
    end = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < end, f"it did not come within {within:g} s"
        time.sleep(0.01)
    return value


def skip_time(seconds: float) -> None:
    """Move the running time of this process on, so that a limit ends now. A long limit then tests what a short one
    does, and a slow machine never reaches it. An event loop notices when it wakes."""
    running_time()  # the thread of the clock has started
    looked, stopped = _clock._state
    _clock._state = looked, stopped - seconds


def run_at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop whose clock jumps to the next timer instead of waiting for it.

    It is for coroutines that wait for timers and for each other alone, not for threads or sockets.
    """
    now = 0.0

    def create_loop() -> asyncio.SelectorEventLoop:
        selector = selectors.DefaultSelector()
        poll = selector.select

        def skip(timeout: float | None = None) -> Any:
            nonlocal now
            now += timeout or 0.0
            return poll(0)

        selector.select = skip  # type: ignore[method-assign]
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: now  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=create_loop) as runner:
        return runner.run(work)
