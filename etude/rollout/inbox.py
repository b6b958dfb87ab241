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

__all__ = ["Inbox"]

T = TypeVar("T")

ANSWERING = 600.0
"""Seconds that a question waits for its answer."""


class Inbox:
    """Acts in the order in which they came; one thread does them."""

    def __init__(self) -> None:
        self._posts: deque[tuple[Callable[[], object], Sequence[Future[Any]]]] = deque()
        self._changed = threading.Condition()
        self._closed = ""

    def post(self, act: Callable[[], object], *waiting: Future[Any]) -> None:
        """Have this done. Where it raises, those who wait are told."""
        with self._changed:
            if self._closed:
                raise EngineError(self._closed)
            self._posts.append((act, waiting))
            self._changed.notify()

    def ask(self, act: Callable[[], T]) -> T:
        """Have this done, and wait for what comes of it."""
        asked = self._asked(act)
        try:
            return asked.result(ANSWERING)
        except TimeoutError:
            return _late(asked)

    async def between(self, act: Callable[[], T]) -> T:
        """The same, on an event loop. Who cancels the wait does not cancel the act."""
        asked = self._asked(act)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), ANSWERING)
        except TimeoutError:
            return _late(asked)

    def work(self, ready: Callable[[], bool], idle: Callable[[], None]) -> bool:
        """Do what was posted, after a wait where there is nothing else to do; False once there will be no more."""
        with self._changed:
            while not (self._posts or self._closed or ready()):
                idle()
                self._changed.wait()
            posted, closed = len(self._posts), self._closed
        for _ in range(posted):
            act, waiting = self._posts.popleft()
            try:
                act()
            except BaseException as error:
                _fail(waiting, error)
        return not closed

    def close(self) -> None:
        """Take nothing more. What was posted is still done."""
        with self._changed:
            self._closed = self._closed or "The engine is closed."
            self._changed.notify()

    def end(self, error: EngineError) -> None:
        """Take nothing more, and tell those whose act will not be done."""
        with self._changed:
            self._closed = self._closed or str(error)
            posts, self._posts = self._posts, deque()
        for _, waiting in posts:
            _fail(waiting, error)

    def _asked(self, act: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self.post(lambda: future.set_result(act()), future)
        return future


def _fail(waiting: Iterable[Future[Any]], error: BaseException) -> None:
    """Tell those who still wait."""
    for future in waiting:
        if not future.done():
            future.set_exception(error)


def _late(asked: Future[T]) -> T:
    """What came of it after all (it may itself have run out of time), or that nothing has."""
    if not asked.done():
        raise EngineError(f"The engine has not answered for {ANSWERING:g} s: it is still computing a step.")
    return asked.result()
