"""How many answers are sampled at once, how many calls wait, and that the rest are told to come again."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from etude.agents.proxy.asked import Refusal

__all__ = ["Gate"]

LONGEST = 30
"""Seconds that anybody is asked to wait at most."""


class Gate:
    """A bounded queue in the order of arrival. Used on one event loop.

    consumes       calls, each for a number of places
    produces       places, all of a call's at once
    waits for      places that are given back
    unblocked by   calls that end; a call that is cancelled leaves the queue
    """

    def __init__(self, running: int, waiting: int) -> None:
        self.places, self.most = running, waiting
        self.taken = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._seconds = 1.0  # what a call takes, lately

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._queue)

    @asynccontextmanager
    async def entered(self, places: int) -> AsyncIterator[None]:
        """Wait for this many places, and hold them. Raises a refusal where too many wait already."""
        places = min(places, self.places)
        if self._queue or self.taken + places > self.places:
            await self._wait(places)
        else:
            self.taken += places
        began = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._seconds += 0.1 * (asyncio.get_running_loop().time() - began - self._seconds)
            self._leave(places)

    async def _wait(self, places: int) -> None:
        if len(self._queue) >= self.most:
            wait = math.ceil(self._seconds * (1 + self.most / self.places))
            wait = max(1, min(wait, LONGEST))
            told = f"{self.taken} answers are being sampled and {self.most} calls wait already. Try again in {wait} s."
            raise Refusal(told, "busy", wait=wait)
        turn = places, asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn[1]
        except asyncio.CancelledError:
            if not turn[1].cancelled():  # its places were given to it meanwhile
                self._leave(places)
            else:
                with suppress(ValueError):  # whoever left before it may have passed it over already
                    self._queue.remove(turn)
                self._admit()
            raise

    def _leave(self, places: int) -> None:
        self.taken -= places
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.taken + self._queue[0][0] <= self.places:
            places, turn = self._queue.popleft()
            if not turn.done():
                self.taken += places
                turn.set_result(None)
