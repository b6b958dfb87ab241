"""How long an answer may take, its wait for others not counted."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from etude.protocols import Ids, TokenGenerator
from etude.records import Completion, SamplingParams

__all__ = ["TimeoutEngine"]


class TimeoutEngine:
    """Asks an engine, and gives each answer so many seconds from the moment that the engine begins with it.

    An engine whose memory is small lets most of what it is asked wait, and that wait is no fault of the answer. It is
    bounded all the same: whatever runs ends within the time it has, so an engine that neither begins nor ends anything
    for twice as long has stopped.
    """

    def __init__(self, engine: TokenGenerator, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds
        self._waiting: set[asyncio.Timeout] = set()
        self._stirred = 0.0  # when the engine last began or ended something, or was asked
        self._watch: asyncio.TimerHandle | None = None  # one for all who wait

    async def generate(self, prompt: Ids, sampling: SamplingParams) -> Completion:
        """What the engine answers. Raises `TimeoutError`."""
        loop = asyncio.get_running_loop()

        def begins() -> None:
            if bound in self._waiting and not bound.expired():
                self._leave(bound)
                bound.reschedule(loop.time() + self._seconds)

        def tell() -> None:  # on a thread of the engine's
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(begins)

        async with asyncio.timeout(None) as bound:
            self._waiting.add(bound)
            self._stirred = loop.time()
            if self._watch is None:
                self._look()
            try:
                return await self._engine.generate(prompt, sampling, on_start=tell)
            finally:
                self._leave(bound)

    def _leave(self, bound: asyncio.Timeout) -> None:
        """The engine does something: whoever waits may go on waiting."""
        self._waiting.discard(bound)
        self._stirred = asyncio.get_running_loop().time()
        if not self._waiting and self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self) -> None:
        """End the wait of everybody if the engine has stopped; else look again when it may have."""
        loop = asyncio.get_running_loop()
        due = self._stirred + 2 * self._seconds
        if loop.time() < due:
            self._watch = loop.call_at(due, self._look)
            return
        self._watch = None
        for bound in self._waiting:
            if not bound.expired():
                bound.reschedule(loop.time())
