"""How long an answer may take, its wait for others not counted."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from etude.protocols import Generate, Ids
from etude.records import Completion, SamplingParams

__all__ = ["Patience"]


class Patience:
    """Asks an engine, and gives each answer so many seconds from the moment that the engine begins with it.

    An engine whose memory is small lets most of what it is asked wait, and that wait is no fault of the answer. It is
    bounded all the same: whatever runs ends within the time it has, so an engine that neither begins nor ends anything
    for twice as long has stopped.
    """

    def __init__(self, engine: Generate, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds
        self._waiting: set[asyncio.Timeout] = set()

    async def generate(self, prompt: Ids, sampling: SamplingParams) -> Completion:
        """What the engine answers. Raises `TimeoutError`."""
        loop = asyncio.get_running_loop()
        bound = asyncio.timeout(2 * self._seconds)

        def begins() -> None:
            if bound in self._waiting:
                self._waiting.discard(bound)
                self._put_off(bound, self._seconds)
                self._stir()

        def tell() -> None:  # on a thread of the engine's
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(begins)

        async with bound:
            self._waiting.add(bound)
            try:
                return await self._engine.generate(prompt, sampling, begun=tell)
            finally:
                self._waiting.discard(bound)
                self._stir()

    def _stir(self) -> None:
        """The engine does something: whoever waits may go on waiting."""
        for bound in self._waiting:
            self._put_off(bound, 2 * self._seconds)

    def _put_off(self, bound: asyncio.Timeout, seconds: float) -> None:
        if not bound.expired():
            bound.reschedule(asyncio.get_running_loop().time() + seconds)
