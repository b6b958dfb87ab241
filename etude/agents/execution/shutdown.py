"""Event loops and processes that end although something in them will not."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from etude.agents.worker_threads import WorkerThreads
from etude.observe.log import get_logger

__all__ = ["bounded_exit", "run_bounded"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = get_logger("agents")


def run_bounded(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """What comes of some work on a loop of its own. `asyncio.run` waits in the end for every task, and so for ever for
    one that goes on although it was cancelled; here that is waited for so many seconds, and left."""
    loop = _ThreadedLoop()
    loop.set_exception_handler(_handle_loop_exception)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        try:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=timeout_s))
            with suppress(TimeoutError):
                loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), timeout_s))
        finally:
            loop.close()


class _ThreadedLoop(asyncio.SelectorEventLoop):
    """A loop whose calls on threads (`asyncio.to_thread`) keep no process from ending, however long they hang."""

    _threads: WorkerThreads | None = None

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call a function on a thread: one of the loop's own, unless others are given."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        self._threads = self._threads or WorkerThreads("etude-agent-thread")
        return self.create_task(self._threads.call(partial(func, *args)))

    def close(self) -> None:
        """End the loop, and the threads that nobody needs any more."""
        if self._threads is not None:
            self._threads.close()
        super().close()


def _handle_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """That a task was left is known by then; whatever else a loop has to say is said."""
    if not (loop.is_closed() and "was destroyed but it is pending" in context["message"]):
        loop.default_exception_handler(context)


@contextmanager
def bounded_exit(timeout_s: float, code: int) -> Iterator[None]:
    """What is done within is the last that its process does: threads that were begun there, and that Python would wait
    for, have so many seconds left. Where they need more, the process ends all the same: with this code, if by an
    error."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        error = sys.exc_info()[1]
        deadline = time.monotonic() + timeout_s
        new_threads = [thread for thread in threading.enumerate() if not thread.daemon and thread not in before]
        for thread in new_threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in new_threads):
            if error is not None:
                log.error("%s", error)
            log.warning("Threads that an agent began do not end, and end with this process.")
            logging.shutdown()
            os._exit(0 if error is None else code)
