"""Cached replies: a client that lost a reply repeats the request and receives it, without a second execution."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

REPLY_TTL_S = 120.0
"""Seconds that a reply is cached. A client stops its retries earlier."""
HttpReply = tuple[int, bytes]
"""A status and a body."""


@dataclass(frozen=True)
class CacheQuota:
    """Limits of cached replies, of one key or of all, in number and bytes. Beyond them the oldest are dropped first."""

    answers: int
    bytes: int


SHARED_QUOTA = CacheQuota(2**17, 64 * 2**20)
"""Quota of all keys together, and of one shared key."""
ATTEMPT_QUOTA = CacheQuota(512, 2**20)
"""Quota of one attempt's own key."""


@dataclass
class _CachedReply:
    """A request under way or done, and the number of callers that wait for it."""

    at: float
    owner: Hashable
    task: asyncio.Task[HttpReply] | None
    """None once the request is done, since a task holds references to everything it used."""
    answer: HttpReply = (0, b"")
    waiting: int = 0


@dataclass
class _OwnerReplies:
    """The cached replies of one owner, the oldest first."""

    names: dict[Hashable, None] = field(default_factory=dict)
    bytes: int = 0


class ReplyCache:
    """Replies by the cache key of their request.

    A request that repeats one under way waits for the same reply. A request that raised an exception is forgotten; its
    repetition is executed.
    """

    def __init__(self, ttl_s: float = REPLY_TTL_S, quota: CacheQuota = SHARED_QUOTA) -> None:
        self._ttl_s = ttl_s
        self._quota = quota
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
        """Return the cached reply, or execute the request. The execution continues even if the caller is cancelled.

        owner: the key of the client, whose replies are limited by `quota`.
        """
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
        """Return whether the request is under way or cached."""
        return key in self._replies

    async def abandon(self, key: Hashable, undo: Callable[[HttpReply], Awaitable[None]]) -> None:
        """Drop a request whose caller has disconnected, unless another caller waits for it. A request under way is
        cancelled; a reply is passed to `undo`."""
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
        task = asyncio.create_task(run())
        entry = self._replies[key] = _CachedReply(time.monotonic(), owner, task)
        self._by_owner.setdefault(owner, _OwnerReplies()).names[key] = None
        task.add_done_callback(lambda finished: self._done(key, entry, finished, quota))
        return entry

    def _done(self, key: Hashable, entry: _CachedReply, task: asyncio.Task[HttpReply], quota: CacheQuota) -> None:
        """Cache a reply, within its owner's quota."""
        if self._replies.get(key) is not entry:
            return
        if task.cancelled() or task.exception() is not None:
            self._forget(key)
            return
        entry.answer = task.result()
        entry.task = None
        replies, size = self._by_owner[entry.owner], len(entry.answer[1])
        replies.bytes += size
        self._bytes += size
        for oldest in list(islice(replies.names, 4)):
            if len(replies.names) > quota.answers or replies.bytes > quota.bytes:
                self._forget(oldest, only_done=True)

    def _forget_old(self) -> None:
        """Drop expired replies and those beyond the quota, up to four of the oldest. That is more than the next call
        can add."""
        before = time.monotonic() - self._ttl_s
        for key, entry in list(islice(self._replies.items(), 4)):
            if entry.at < before or self._bytes > self._quota.bytes or len(self._replies) > self._quota.answers:
                self._forget(key, only_done=True)

    def _forget(self, key: Hashable, *, only_done: bool = False) -> None:
        """Drop an entry. only_done: keep it if it is under way."""
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
