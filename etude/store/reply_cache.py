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

    def __init__(self, ttl_s: float = REPLY_TTL_S, quota: CacheQuota = SHARED_QUOTA) -> None:
        self._ttl_s, self._quota = ttl_s, quota
        self._replies: dict[Hashable, _CachedReply] = {}
        self._by_owner: dict[Hashable, _OwnerReplies] = {}
        self._bytes = 0

    async def get_or_run(
        self,
        key: Hashable,
        run: Callable[[], Coroutine[Any, Any, HttpReply]],
        owner: Hashable = None,
        quota: CacheQuota = SHARED_QUOTA,
    ) -> HttpReply:
        """The answer, made now if it was not before. It is made to its end, even where who asked is cancelled.

        owner: the key it is asked with, of which no more than this share is kept."""
        self._forget_old()
        entry = self._replies.get(key)
        if entry is None:
            entry = self._begin(key, run, owner, quota)
        if entry.task is None:
            return entry.answer
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiting -= 1

    def contains(self, key: Hashable) -> bool:
        """Whether this was asked, and is kept."""
        return key in self._replies

    async def abandon(self, key: Hashable, undo: Callable[[HttpReply], Awaitable[None]]) -> None:
        """Who asked has gone. Where nobody else waits, it is as if it had not been asked: what is under way is
        cancelled, and what was done is undone."""
        entry = self._replies.get(key)
        if entry is None or entry.waiting:
            return
        self._forget(key)
        reply: HttpReply | None = entry.answer
        if entry.task is not None:
            entry.task.cancel()
            await asyncio.wait({entry.task})
            failed = entry.task.cancelled() or entry.task.exception() is not None
            reply = None if failed else entry.task.result()
        if reply is not None:
            await undo(reply)

    def _begin(
        self, key: Hashable, run: Callable[[], Coroutine[Any, Any, HttpReply]], owner: Hashable, quota: CacheQuota
    ) -> _CachedReply:
        """One that was not asked before."""
        task = asyncio.create_task(run())
        entry = self._replies[key] = _CachedReply(time.monotonic(), owner, task)
        self._by_owner.setdefault(owner, _OwnerReplies()).names[key] = None
        task.add_done_callback(lambda finished: self._done(key, entry, finished, quota))
        return entry

    def _done(self, key: Hashable, entry: _CachedReply, task: asyncio.Task[HttpReply], quota: CacheQuota) -> None:
        """Keep an answer, within its owner's share."""
        if self._replies.get(key) is not entry:
            return
        if task.cancelled() or task.exception() is not None:
            self._forget(key)
            return
        entry.answer, entry.task = task.result(), None
        replies, size = self._by_owner[entry.owner], len(entry.answer[1])
        replies.bytes += size
        self._bytes += size
        for oldest in list(islice(replies.names, 4)):
            if len(replies.names) > quota.answers or replies.bytes > quota.bytes:
                self._forget(oldest, only_done=True)

    def _forget_old(self) -> None:
        """A few at a time, of those asked first: more than can come in until the next call."""
        before = time.monotonic() - self._ttl_s
        for key, entry in list(islice(self._replies.items(), 4)):
            if entry.at < before or self._bytes > self._quota.bytes or len(self._replies) > self._quota.answers:
                self._forget(key, only_done=True)

    def _forget(self, key: Hashable, *, only_done: bool = False) -> None:
        """It is not known any more. done: only if it is not under way."""
        entry = self._replies[key]
        if only_done and entry.task is not None:
            return
        del self._replies[key]
        replies, size = self._by_owner[entry.owner], len(entry.answer[1])
        del replies.names[key]
        replies.bytes -= size
        self._bytes -= size
        if not replies.names:
            del self._by_owner[entry.owner]
