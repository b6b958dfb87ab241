"""Event loops and processes that end even if a task or a thread within does not."""

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
from etude.running_time import EventLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = get_logger("agents")


def run_bounded(coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run a coroutine on its own event loop and return its result. `asyncio.run` waits for every task at the end, and
    so forever for one that ignores its cancellation. This waits `timeout_s` seconds and abandons the rest."""
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


class _ThreadedLoop(EventLoop):
    """An event loop whose calls of `asyncio.to_thread` never keep the process from exiting, however long they hang."""

    _threads: WorkerThreads | None = None

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call a function on one of the loop's own threads, or by the given executor."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        self._threads = self._threads or WorkerThreads("etude-agent-thread")
        return self.create_task(self._threads.call(partial(func, *args)))

    def close(self) -> None:
        """Close the loop, and end its idle threads."""
        if self._threads is not None:
            self._threads.close()
        super().close()


def _handle_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Pass on all messages of a loop, except that an abandoned task was destroyed: that was logged before."""
    if not (loop.is_closed() and "was destroyed but it is pending" in context["message"]):
        loop.default_exception_handler(context)


@contextmanager
def bounded_exit(timeout_s: float, code: int) -> Iterator[None]:
    """Run the last code of a process. Threads started within, which Python would wait for, get `timeout_s` seconds to
    end. If they take longer, the process exits anyway: with `code` after an error, else with 0."""
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
            log.warning("Threads that an agent started did not end; they end with this process.")
            logging.shutdown()
            os._exit(0 if error is None else code)
