"""Heavy work beside the event loop, on one thread: at most one thread then competes with the loop for the interpreter.
Each owner of a key has a limited number of requests in work, which leaves room for others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from etude.store.http.request_limits import INLINE_BYTES

P = ParamSpec("P")
T = TypeVar("T")
SWITCH_S = 0.0005
"""Switch interval of the interpreter, in seconds. An event loop waits for the interpreter several times per request:
with Python's default of 5 ms, heavy work beside it added 60 ms to every request."""


class BackgroundThread:
    """A thread for work that would block an event loop. It is used on one event loop at a time."""

    def __init__(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))  # permanent, for the whole process
        self._thread = _thread()
        self._semaphores: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    def close(self) -> None:
        """End the thread after its present work. Later work starts another."""
        self._thread.shutdown(wait=False)
        self._thread = _thread()

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the work, inline if it is on few bytes, else on the thread; return its result."""
        if size <= INLINE_BYTES:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    @asynccontextmanager
    async def slot(self, owner: Hashable, size: int, max_concurrency: int = 1) -> AsyncIterator[None]:
        """Wait until fewer than `max_concurrency` long requests of this owner are in work. A short request does not
        wait."""
        if size <= INLINE_BYTES:
            yield
            return
        semaphore = self._semaphores.get(owner)
        if semaphore is None:
            semaphore = self._semaphores[owner] = asyncio.Semaphore(max_concurrency)
        async with semaphore:
            yield


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="etude-aside")  # the thread starts with its first work
