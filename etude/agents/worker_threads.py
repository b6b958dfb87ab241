"""Threads on which a loop has functions called that may take long, as many as are needed at once.

A thread cannot be ended from outside. Whoever does not wait any longer leaves it: it is counted as left until its
function returns, and another takes its place.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

__all__ = ["WorkerThreads"]

R = TypeVar("R")


class _ThreadWork(NamedTuple):
    context: Context
    function: Callable[[], Any]
    future: asyncio.Future[Any]


class WorkerThreads:
    """Threads of one loop. They end with `close`, or with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[SimpleQueue[_ThreadWork | None]] = []
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.abandoned = 0
        """Threads whose function nobody waits for any more, and that still run it."""

    async def call(self, function: Callable[[], R]) -> R:
        """Call a function on a thread, in a copy of this context. Cancelled, the thread is left."""
        queue = self._idle.pop() if self._idle else self._start_thread()
        future: asyncio.Future[R] = self._loop.create_future()
        queue.put(_ThreadWork(copy_context(), function, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self.abandoned += 1
            raise

    def close(self) -> None:
        """Take no more calls; threads end when their function does."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _start_thread(self) -> SimpleQueue[_ThreadWork | None]:
        queue: SimpleQueue[_ThreadWork | None] = SimpleQueue()
        threading.Thread(target=self._serve, args=(queue,), name=self._name, daemon=True).start()
        return queue

    def _serve(self, queue: SimpleQueue[_ThreadWork | None]) -> None:
        while (work := queue.get()) is not None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = work.context.run(work.function)
            except BaseException as raised:  # whatever an agent raises is its caller's to tell
                error = raised
            with suppress(RuntimeError):  # a loop that is closed has nobody who waits
                self._loop.call_soon_threadsafe(self._finish, queue, work.future, result, error)

    def _finish(
        self,
        queue: SimpleQueue[_ThreadWork | None],
        future: asyncio.Future[Any],
        result: Any,
        error: BaseException | None,
    ) -> None:
        """A thread is free again."""
        if self._closed:
            queue.put(None)
        else:
            self._idle.append(queue)
        if future.cancelled():
            self.abandoned -= 1
        elif error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):
            future.set_exception(_wrap_stop_iteration(error))  # a future does not take it
        else:
            future.set_exception(error)


def _wrap_stop_iteration(error: StopIteration) -> RuntimeError:
    wrapper = RuntimeError("the function raised StopIteration")
    wrapper.__cause__ = error
    return wrapper
