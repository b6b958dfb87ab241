"""The slot queue: bounds the answers that are sampled at once and the calls that wait, and refuses further calls."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from etude.agents.proxy.request import APIError

MAX_RETRY_AFTER = 30
"""The most seconds that a refused call is asked to wait."""


class SlotQueue:
    """A bounded first-come, first-served queue. Used on one event loop.

    consumes       calls, each of which needs a number of slots
    produces       slots, all of a call's at once
    waits for      slots that are released
    unblocked by   calls that end; a cancelled call leaves the queue
    """

    def __init__(self, running: int, waiting: int) -> None:
        self.limit = running
        self.max_waiting = waiting
        self.running = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._mean_seconds = 1.0  # moving average of a call's duration

    @property
    def waiting(self) -> int:
        """The number of calls that wait."""
        return len(self._queue)

    @asynccontextmanager
    async def acquire(self, slots: int) -> AsyncIterator[int]:
        """Wait for this many slots, or for all that exist, and hold them. Raise an `APIError` if too many calls wait
        already."""
        slots = min(slots, self.limit)
        if self._queue or self.running + slots > self.limit:
            await self._wait(slots)
        else:
            self.running += slots
        began = asyncio.get_running_loop().time()
        try:
            yield slots
        finally:
            self._mean_seconds += 0.1 * (asyncio.get_running_loop().time() - began - self._mean_seconds)
            self._release(slots)

    async def _wait(self, slots: int) -> None:
        if len(self._queue) >= self.max_waiting:
            retry_after = math.ceil(self._mean_seconds * (1 + self.max_waiting / self.limit))
            retry_after = max(1, min(retry_after, MAX_RETRY_AFTER))
            message = (
                f"{self.running} answers are being sampled and {self.max_waiting} calls wait already. "
                f"Try again in {retry_after} s."
            )
            raise APIError(message, "busy", retry_after=retry_after)
        waiter = slots, asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        try:
            await waiter[1]
        except asyncio.CancelledError:
            if not waiter[1].cancelled():  # it got its slots meanwhile
                self._release(slots)
            else:
                with suppress(ValueError):  # `_admit` may have removed it already
                    self._queue.remove(waiter)
                self._admit()
            raise

    def _release(self, slots: int) -> None:
        self.running -= slots
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.running + self._queue[0][0] <= self.limit:
            slots, waiter = self._queue.popleft()
            if not waiter.done():
                self.running += slots
                waiter.set_result(None)
