"""Heavy work beside the event loop: on one thread, so that whoever waits for the interpreter waits for one alone, and
so much of each key's at once as leaves room for others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from etude.store.request_limits import INLINE_BYTES

__all__ = ["BackgroundThread"]

P = ParamSpec("P")
T = TypeVar("T")
SWITCH_S = 0.0005
"""Seconds after which a thread that waits for the interpreter gets it. An event loop waits several times a request, so
that Python's own 5 ms were 60 ms of every request beside heavy work."""


class BackgroundThread:
    """A thread that does what would keep an event loop busy. Used on one event loop at a time."""

    def __init__(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))  # for good, and for all of the process
        self._thread = _thread()
        self._semaphores: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    def close(self) -> None:
        """End the thread, after what it is doing; work that comes later starts another."""
        self._thread.shutdown(wait=False)
        self._thread = _thread()

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the work at once where it is on few bytes, else on the thread; return its result."""
        if size <= INLINE_BYTES:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    @asynccontextmanager
    async def slot(self, owner: Hashable, size: int, max_concurrency: int = 1) -> AsyncIterator[None]:
        """Wait until no more than so many of an owner's requests are worked on, where this one has many bytes."""
        if size <= INLINE_BYTES:
            yield
            return
        semaphore = self._semaphores.get(owner)
        if semaphore is None:
            semaphore = self._semaphores[owner] = asyncio.Semaphore(max_concurrency)
        async with semaphore:
            yield


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="etude-aside")  # which begins with its first work
