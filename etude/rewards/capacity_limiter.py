"""A limit on the calls that run at the same time, in any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary


class CapacityLimiter:
    """At most `limit` calls at a time, in order of arrival. Each event loop has its own limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a free slot and hold it."""
        semaphore = self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))
        async with semaphore:
            yield
