"""What others want done by the thread of the embedded engine, between two tokens.

consumes       acts, from any thread and any event loop
produces       what came of each, or what went wrong in it, for those who wait for it
waits for      acts, where there is nothing to compute; those who ask wait for the step under way and for their turn
unblocked by   an act, or the end: whoever waits then is told, and whoever comes later is refused at once
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from etude.errors import EngineError

__all__ = ["CommandQueue"]

T = TypeVar("T")

CALL_TIMEOUT = 600.0
"""Seconds that a question waits for its answer."""


class CommandQueue:
    """Acts in the order in which they came; one thread does them."""

    def __init__(self) -> None:
        self._commands: deque[tuple[Callable[[], object], Sequence[Future[Any]]]] = deque()
        self._changed = threading.Condition()
        self._closed = ""

    def submit(self, command: Callable[[], object], *futures: Future[Any]) -> None:
        """Have this done. Where it raises, those who wait are told."""
        with self._changed:
            if self._closed:
                raise EngineError(self._closed)
            self._commands.append((command, futures))
            self._changed.notify()

    def call(self, command: Callable[[], T]) -> T:
        """Have this done, and wait for what comes of it."""
        future = self._submit_call(command)
        try:
            return future.result(CALL_TIMEOUT)
        except TimeoutError:
            return _late_result(future)

    async def call_async(self, command: Callable[[], T]) -> T:
        """The same, on an event loop. Who cancels the wait does not cancel the act."""
        future = self._submit_call(command)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), CALL_TIMEOUT)
        except TimeoutError:
            return _late_result(future)

    def run_pending(self, has_work: Callable[[], bool], on_idle: Callable[[], None]) -> bool:
        """Do what was posted, after a wait where there is nothing else to do; False once there will be no more."""
        with self._changed:
            while not (self._commands or self._closed or has_work()):
                on_idle()
                self._changed.wait()
            count, closed = len(self._commands), self._closed
        for _ in range(count):
            command, futures = self._commands.popleft()
            try:
                command()
            except BaseException as error:
                _fail_futures(futures, error)
        return not closed

    def close(self) -> None:
        """Take nothing more. What was posted is still done."""
        with self._changed:
            self._closed = self._closed or "The engine is closed."
            self._changed.notify()

    def fail_pending(self, error: EngineError) -> None:
        """Take nothing more, and tell those whose act will not be done."""
        with self._changed:
            self._closed = self._closed or str(error)
            commands, self._commands = self._commands, deque()
        for _, futures in commands:
            _fail_futures(futures, error)

    def _submit_call(self, command: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self.submit(lambda: future.set_result(command()), future)
        return future


def _fail_futures(futures: Iterable[Future[Any]], error: BaseException) -> None:
    """Tell those who still wait."""
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _late_result(future: Future[T]) -> T:
    """What came of it after all (it may itself have run out of time), or that nothing has."""
    if not future.done():
        raise EngineError(f"The engine has not answered for {CALL_TIMEOUT:g} s: it is still computing a step.")
    return future.result()
