"""A clock that stands still while this process is stopped, and event loops whose timers follow it.

Ctrl-Z stops a process, and so do debuggers and the pause of a container or a virtual machine. The monotonic clock of
the system goes on meanwhile. So every timer has run out when the process continues, before its work could. While the
whole machine sleeps, that clock stands still by itself.

A thread looks at the monotonic clock once a second. It is late only if this process could not run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TICK_S = 1.0
"""Seconds between two looks."""
MAX_GAP_S = 2.0
"""The most seconds between two looks that count. The rest was a stop."""
_CLOCK_WITH_SLEEP = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # on macOS the latter counts sleep too


class _Clock:
    """The clock. Any thread may read it."""

    def __init__(self) -> None:
        self._state = time.monotonic(), 0.0
        """The time of the last look, and the seconds of all stops before it."""
        self._slept_before = self._read_sleep()
        self._thread = threading.Thread()
        self._starting = threading.Lock()

    def running(self) -> float:
        """Return the seconds since some moment in which this process could run."""
        if not self._thread.is_alive():  # it has not started yet, or this process was forked
            self._start()
        looked, stopped = self._state
        return min(time.monotonic(), looked + MAX_GAP_S) - stopped

    def stopped(self) -> float:
        """Return the seconds in which this process was stopped or the machine slept, since the clock was read first."""
        return time.monotonic() - self.running() + self._read_sleep() - self._slept_before

    def _start(self) -> None:
        with self._starting:
            if not self._thread.is_alive():
                self._state = time.monotonic(), self._state[1]
                self._thread = threading.Thread(target=self._look, name="clock", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            looked, stopped = self._state
            now = time.monotonic()
            self._state = now, stopped + max(0.0, now - looked - MAX_GAP_S)
            time.sleep(TICK_S)

    @staticmethod
    def _read_sleep() -> float:
        return time.clock_gettime(_CLOCK_WITH_SLEEP) - time.monotonic()


_clock = _Clock()


def running_time() -> float:
    """Return the seconds since some moment in which this process could run: a monotonic clock without its stops."""
    return _clock.running()


def stopped_time() -> float:
    """Return the seconds in which this process was stopped or the machine slept, since `running_time` was first
    called."""
    return _clock.stopped()


class EventLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers stand still while this process is stopped."""

    def time(self) -> float:
        """Return the time of its timers."""
        return running_time()


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Limit the time of a block, as `asyncio.timeout` does, by the running time on any event loop."""
    loop, until = asyncio.get_running_loop(), running_time() + seconds
    timer: asyncio.TimerHandle | None = None

    def check() -> None:
        nonlocal timer
        if (left := until - running_time()) > 0:
            timer = loop.call_later(left, check)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        check()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
