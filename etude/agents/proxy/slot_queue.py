"""How many answers are sampled at once, how many calls wait, and that the rest are told to come again."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from etude.agents.proxy.request import APIError

__all__ = ["SlotQueue"]

LONGEST = 30
"""Seconds that anybody is asked to wait at most."""


class SlotQueue:
    """A bounded queue in the order of arrival. Used on one event loop.

    consumes       calls, each for a number of places
    produces       places, all of a call's at once
    waits for      places that are given back
    unblocked by   calls that end; a call that is cancelled leaves the queue
    """

    def __init__(self, running: int, waiting: int) -> None:
        self.limit, self.max_waiting = running, waiting
        self.running = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._seconds = 1.0  # what a call takes, lately

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._queue)

    @asynccontextmanager
    async def acquire(self, places: int) -> AsyncIterator[int]:
        """Wait for this many places, or for all there are, and hold them. Raises a refusal where too many wait
        already."""
        places = min(places, self.limit)
        if self._queue or self.running + places > self.limit:
            await self._wait(places)
        else:
            self.running += places
        began = asyncio.get_running_loop().time()
        try:
            yield places
        finally:
            self._seconds += 0.1 * (asyncio.get_running_loop().time() - began - self._seconds)
            self._leave(places)

    async def _wait(self, places: int) -> None:
        if len(self._queue) >= self.max_waiting:
            wait = math.ceil(self._seconds * (1 + self.max_waiting / self.limit))
            wait = max(1, min(wait, LONGEST))
            message = (
                f"{self.running} answers are being sampled and {self.max_waiting} calls wait already. "
                f"Try again in {wait} s."
            )
            raise APIError(message, "busy", retry_after=wait)
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
        self.running -= places
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.running + self._queue[0][0] <= self.limit:
            places, turn = self._queue.popleft()
            if not turn.done():
                self.running += places
                turn.set_result(None)
