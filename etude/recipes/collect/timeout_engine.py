"""The timeout of an answer, which does not count its wait in the engine's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from etude.protocols import Ids, TokenGenerator
from etude.records import Completion, SamplingParams


class TimeoutEngine:
    """Calls an engine, and gives each answer `seconds` from the moment that the engine begins with it.

    An engine with little memory lets most requests wait, and that wait is no fault of the answer. It is bounded all the
    same. Each running answer ends within its time, so an engine that neither begins nor ends an answer for twice as
    long has stalled.
    """

    def __init__(self, engine: TokenGenerator, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds
        self._waiting: set[asyncio.Timeout] = set()
        self._last_activity = 0.0  # time when the engine last began or ended an answer, or got a request
        self._timer: asyncio.TimerHandle | None = None  # one timer for all waiting requests

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, on_start: Callable[[], None] = lambda: None
    ) -> Completion:
        """Return the engine's answer. Raises `TimeoutError`. on_start: called on any thread when the engine begins."""
        loop = asyncio.get_running_loop()

        def start_timeout() -> None:
            if timeout in self._waiting and not timeout.expired():
                self._remove(timeout)
                timeout.reschedule(loop.time() + self._seconds)

        def on_engine_start() -> None:  # called on an engine thread
            on_start()
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(start_timeout)

        async with asyncio.timeout(None) as timeout:
            self._waiting.add(timeout)
            self._last_activity = loop.time()
            if self._timer is None:
                self._check_stalled()
            try:
                return await self._engine.generate(prompt, sampling, on_start=on_engine_start)
            finally:
                self._remove(timeout)

    def _remove(self, timeout: asyncio.Timeout) -> None:
        """Take a request out of the waiting ones. The engine is active, so the others may wait longer."""
        self._waiting.discard(timeout)
        self._last_activity = asyncio.get_running_loop().time()
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_stalled(self) -> None:
        """End all waits if the engine has stalled; else check again when it may have."""
        loop = asyncio.get_running_loop()
        deadline = self._last_activity + 2 * self._seconds
        if loop.time() < deadline:
            self._timer = loop.call_at(deadline, self._check_stalled)
            return
        self._timer = None
        for timeout in self._waiting:
            if not timeout.expired():
                timeout.reschedule(loop.time())
