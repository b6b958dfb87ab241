"""Threads on which an event loop calls functions that may take long, as many as are needed at once.

A thread cannot be ended from outside. A caller that stops waiting abandons the thread: it counts as abandoned until its
function returns, and another thread takes its place.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

R = TypeVar("R")


_ThreadWork: TypeAlias = tuple[Context, Callable[[], Any], asyncio.Future[Any]]


class WorkerThreads:
    """The worker threads of one loop. They end with `close`, or with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[SimpleQueue[_ThreadWork | None]] = []
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.abandoned = 0
        """Threads whose caller no longer waits, and whose function still runs."""

    async def call(self, function: Callable[[], R]) -> R:
        """Call a function on a thread, in a copy of this context. A cancelled call abandons the thread."""
        queue = self._idle.pop() if self._idle else self._start_thread()
        future: asyncio.Future[R] = self._loop.create_future()
        queue.put((copy_context(), function, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self.abandoned += 1
            raise

    def close(self) -> None:
        """Take no more calls. Each thread ends when its function returns."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _start_thread(self) -> SimpleQueue[_ThreadWork | None]:
        queue: SimpleQueue[_ThreadWork | None] = SimpleQueue()
        threading.Thread(target=self._serve, args=(queue,), name=self._name, daemon=True).start()
        return queue

    def _serve(self, queue: SimpleQueue[_ThreadWork | None]) -> None:
        while (work := queue.get()) is not None:
            context, function, future = work
            result: Any = None
            error: BaseException | None = None
            try:
                result = context.run(function)
            except BaseException as raised:  # the caller reports any error of an agent
                error = raised
            try:
                self._loop.call_soon_threadsafe(self._finish, queue, future, result, error)
            except RuntimeError:  # the loop is closed: no caller waits, and nothing ends this thread later
                return

    def _finish(
        self,
        queue: SimpleQueue[_ThreadWork | None],
        future: asyncio.Future[Any],
        result: Any,
        error: BaseException | None,
    ) -> None:
        """Hand over the result, and mark the thread as idle."""
        if self._closed:
            queue.put(None)
        else:
            self._idle.append(queue)
        if future.cancelled():
            self.abandoned -= 1
        elif error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):
            wrapper = RuntimeError("the function raised StopIteration")  # a future does not accept it
            wrapper.__cause__ = error
            future.set_exception(wrapper)
        else:
            future.set_exception(error)
