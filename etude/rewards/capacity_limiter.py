"""A line to stand in: so many at a time, in whatever event loop they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

__all__ = ["CapacityLimiter"]


class CapacityLimiter:
    """Lets at most `places` through at a time, first come, first served. Loops that run side by side do not see each
    other."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        semaphore = self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))
        async with semaphore:
            yield
