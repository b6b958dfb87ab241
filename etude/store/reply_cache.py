"""Answers that are kept for a while, so that who did not hear one can ask again without its being done again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

__all__ = ["ATTEMPT_QUOTA", "REPLY_TTL_S", "SHARED_QUOTA", "CacheQuota", "HttpReply", "ReplyCache"]

REPLY_TTL_S = 120.0
"""Seconds that an answer is kept; a client gives up asking again before they are over."""
HttpReply = tuple[int, bytes]
"""A status, and a body."""


@dataclass(frozen=True)
class CacheQuota:
    """How many answers are kept, of one key or of all, and how many bytes of them. Beyond that the oldest go first."""

    answers: int
    bytes: int


SHARED_QUOTA = CacheQuota(2**17, 64 * 2**20)
"""Of all keys together, and of one that many use."""
ATTEMPT_QUOTA = CacheQuota(512, 2**20)
"""Of an attempt's own key."""


@dataclass
class _CachedReply:
    """Something under way or done, and how many wait for it."""

    at: float
    owner: Hashable
    task: asyncio.Task[HttpReply] | None
    """None once it is done: a task holds on to all that it was made of."""
    answer: HttpReply = (0, b"")
    waiting: int = 0


@dataclass
class _OwnerReplies:
    """The kept answers of one owner, the oldest first."""

    names: dict[Hashable, None] = field(default_factory=dict)
    bytes: int = 0


class ReplyCache:
    """What was answered to what, by whatever names a request and nobody else's.

    One that is asked while the first is under way waits for that one's answer. What ended in an exception is forgotten,
    and asked again it is done again.
    """

    def __init__(self, kept_s: float = REPLY_TTL_S, most: CacheQuota = SHARED_QUOTA) -> None:
        self._kept_s, self._most = kept_s, most
        self._replies: dict[Hashable, _CachedReply] = {}
        self._by_owner: dict[Hashable, _OwnerReplies] = {}
        self._bytes = 0

    async def get_or_run(
        self,
        name: Hashable,
        make: Callable[[], Coroutine[Any, Any, HttpReply]],
        owner: Hashable = None,
        share: CacheQuota = SHARED_QUOTA,
    ) -> HttpReply:
        """The answer, made now if it was not before. It is made to its end, even where who asked is cancelled.

        owner: the key it is asked with, of which no more than this share is kept."""
        self._forget_old()
        asked = self._replies.get(name)
        if asked is None:
            asked = self._begin(name, make, owner, share)
        if asked.task is None:
            return asked.answer
        asked.waiting += 1
        try:
            return await asyncio.shield(asked.task)
        finally:
            asked.waiting -= 1

    def contains(self, name: Hashable) -> bool:
        """Whether this was asked, and is kept."""
        return name in self._replies

    async def abandon(self, name: Hashable, undo: Callable[[HttpReply], Awaitable[None]]) -> None:
        """Who asked has gone. Where nobody else waits, it is as if it had not been asked: what is under way is
        cancelled, and what was done is undone."""
        asked = self._replies.get(name)
        if asked is None or asked.waiting:
            return
        self._forget(name)
        answer: HttpReply | None = asked.answer
        if asked.task is not None:
            asked.task.cancel()
            await asyncio.wait({asked.task})
            failed = asked.task.cancelled() or asked.task.exception() is not None
            answer = None if failed else asked.task.result()
        if answer is not None:
            await undo(answer)

    def _begin(
        self, name: Hashable, make: Callable[[], Coroutine[Any, Any, HttpReply]], owner: Hashable, share: CacheQuota
    ) -> _CachedReply:
        """One that was not asked before."""
        task = asyncio.create_task(make())
        asked = self._replies[name] = _CachedReply(time.monotonic(), owner, task)
        self._by_owner.setdefault(owner, _OwnerReplies()).names[name] = None
        task.add_done_callback(lambda done: self._done(name, asked, done, share))
        return asked

    def _done(self, name: Hashable, asked: _CachedReply, task: asyncio.Task[HttpReply], share: CacheQuota) -> None:
        """Keep an answer, within its owner's share."""
        if self._replies.get(name) is not asked:
            return
        if task.cancelled() or task.exception() is not None:
            self._forget(name)
            return
        asked.answer, asked.task = task.result(), None
        kept, size = self._by_owner[asked.owner], len(asked.answer[1])
        kept.bytes += size
        self._bytes += size
        for oldest in list(islice(kept.names, 4)):
            if len(kept.names) > share.answers or kept.bytes > share.bytes:
                self._forget(oldest, done=True)

    def _forget_old(self) -> None:
        """A few at a time, of those asked first: more than can come in until the next call."""
        before = time.monotonic() - self._kept_s
        for name, asked in list(islice(self._replies.items(), 4)):
            if asked.at < before or self._bytes > self._most.bytes or len(self._replies) > self._most.answers:
                self._forget(name, done=True)

    def _forget(self, name: Hashable, *, done: bool = False) -> None:
        """It is not known any more. done: only if it is not under way."""
        asked = self._replies[name]
        if done and asked.task is not None:
            return
        del self._replies[name]
        kept, size = self._by_owner[asked.owner], len(asked.answer[1])
        del kept.names[name]
        kept.bytes -= size
        self._bytes -= size
        if not kept.names:
            del self._by_owner[asked.owner]
