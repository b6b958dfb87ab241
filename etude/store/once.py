"""Answers that are kept for a while, so that who did not hear one can ask again without its being done again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Any

__all__ = ["KEPT_S", "Answer", "Once"]

KEPT_S = 120.0
"""Seconds that an answer is kept; a client gives up asking again before they are over."""
MOST_BYTES = 64 * 2**20
"""Of answers kept. Beyond that the oldest go first."""
Answer = tuple[int, bytes]
"""A status, and a body."""


@dataclass
class _Asked:
    """Something under way or done, and how many wait for it."""

    at: float
    task: asyncio.Task[Answer]
    waiting: int = 0


class Once:
    """What was answered to what, by whatever names a request and nobody else's.

    One that is asked while the first is under way waits for that one's answer. What ended in an exception is forgotten,
    and asked again it is done again.
    """

    def __init__(self, kept_s: float = KEPT_S, most_bytes: int = MOST_BYTES) -> None:
        self._kept_s, self._most_bytes = kept_s, most_bytes
        self._asked: dict[Hashable, _Asked] = {}
        self._bytes = 0

    async def answer(self, name: Hashable, make: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """The answer, made now if it was not before. It is made to its end, even where who asked is cancelled."""
        self._forget_old()
        asked = self._asked.get(name)
        if asked is None:
            asked = self._asked[name] = _Asked(time.monotonic(), asyncio.create_task(make()))
            asked.task.add_done_callback(lambda _: self._keep(name))
        asked.waiting += 1
        try:
            return await asyncio.shield(asked.task)
        finally:
            asked.waiting -= 1

    def knows(self, name: Hashable) -> bool:
        """Whether this was asked, and is kept."""
        return name in self._asked

    async def abandon(self, name: Hashable, undo: Callable[[Answer], Awaitable[None]]) -> None:
        """Who asked has gone. Where nobody else waits, it is as if it had not been asked: what is under way is
        cancelled, and what was done is undone."""
        asked = self._asked.get(name)
        if asked is None or asked.waiting:
            return
        del self._asked[name]
        if asked.task.done():
            self._bytes -= len(asked.task.result()[1])
        asked.task.cancel()
        await asyncio.wait({asked.task})
        if not asked.task.cancelled() and asked.task.exception() is None:
            await undo(asked.task.result())

    def _keep(self, name: Hashable) -> None:
        asked = self._asked.get(name)
        if asked is None or not asked.task.done():
            return
        if asked.task.cancelled() or asked.task.exception() is not None:
            del self._asked[name]
        else:
            self._bytes += len(asked.task.result()[1])

    def _forget_old(self) -> None:
        """A few at a time, of those asked first: more than can come in until the next call."""
        before = time.monotonic() - self._kept_s
        for name, asked in list(islice(self._asked.items(), 4)):
            if asked.task.done() and (asked.at < before or self._bytes > self._most_bytes):
                self._bytes -= len(asked.task.result()[1])
                del self._asked[name]
