"""Commands to the thread of the embedded engine, which it runs between two tokens.

consumes       commands, from any thread and any event loop
produces       the result or the error of each, for its caller
waits for      commands, while there is nothing to compute; a caller waits for the current step and for its turn
unblocked by   a command, or `close`: waiting callers then get an error, and later commands are refused
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from etude.errors import EngineError

T = TypeVar("T")

CALL_TIMEOUT = 600.0
"""Seconds that a caller waits for the result of a command."""


class EngineCommands:
    """A queue of commands that one thread runs in their order."""

    def __init__(self) -> None:
        self._commands: deque[tuple[Callable[[], object], Sequence[Future[Any]]]] = deque()
        self._changed = threading.Condition()
        self._closed = ""

    def submit(self, command: Callable[[], object], *futures: Future[Any]) -> None:
        """Queue a command. If it raises, the error goes to `futures`."""
        with self._changed:
            if self._closed:
                raise EngineError(self._closed)
            self._commands.append((command, futures))
            self._changed.notify()

    def call(self, command: Callable[[], T]) -> T:
        """Queue a command, and wait for its result."""
        future = self._submit_call(command)
        try:
            return future.result(CALL_TIMEOUT)
        except TimeoutError:
            return _late_result(future)

    async def call_async(self, command: Callable[[], T]) -> T:
        """Do the same on an event loop. A cancelled wait does not cancel the command."""
        future = self._submit_call(command)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), CALL_TIMEOUT)
        except TimeoutError:
            return _late_result(future)

    def run_pending(self, has_work: Callable[[], bool], on_idle: Callable[[], None]) -> bool:
        """Run the queued commands; wait for one if there is no work. Return False after `close`."""
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
        """Accept no further commands. The queued ones still run."""
        with self._changed:
            self._closed = self._closed or "The engine is closed."
            self._changed.notify()

    def fail_pending(self, error: EngineError) -> None:
        """Accept no further commands, and fail the queued ones with this error."""
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
    """Set the error on each future that is not done."""
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _late_result(future: Future[T]) -> T:
    """Return the result if the command is done after all; else raise. The command itself may have raised
    `TimeoutError`."""
    if not future.done():
        raise EngineError(f"The engine has not answered for {CALL_TIMEOUT:g} s: it is still computing a step.")
    return future.result()
