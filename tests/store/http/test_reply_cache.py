"""Replies are cached for a while, within a quota, and for as long as a caller waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from etude.store.http.reply_cache import CacheQuota, HttpReply, ReplyCache
from tests.waits import until


class Work:
    """A request, and the number of times it was executed."""

    def __init__(self, seconds: float = 0.0, size: int = 10) -> None:
        self.seconds, self.size, self.started, self.done = seconds, size, 0, 0

    async def do(self) -> HttpReply:
        """Execute it."""
        self.started += 1
        await asyncio.sleep(self.seconds)
        self.done += 1
        return 200, bytes(self.size)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def test_a_repeated_request_is_not_executed_again() -> None:
    async def story() -> None:
        once, work = ReplyCache(), Work(0.05)
        answers = await asyncio.gather(*(once.get_or_run("a", work.do) for _ in range(3)))
        assert answers == [(200, bytes(10))] * 3 and work.done == 1
        assert await once.get_or_run("a", work.do) == answers[0] and work.done == 1
        await once.get_or_run("b", work.do)
        assert work.done == 2

    run(story)


def test_a_request_is_executed_to_its_end_without_its_caller() -> None:
    async def story() -> None:
        once, work = ReplyCache(), Work(0.05)
        caller = asyncio.create_task(once.get_or_run("a", work.do))
        await until(lambda: work.started)
        caller.cancel()
        await once.get_or_run("a", work.do)
        assert (work.started, work.done) == (1, 1)

    run(story)


def test_a_failed_request_is_executed_again() -> None:
    async def story() -> None:
        once, work = ReplyCache(), Work()

        async def fail() -> HttpReply:
            raise ValueError("not now")

        for _ in range(2):
            result = await asyncio.gather(once.get_or_run("a", fail), return_exceptions=True)
            assert isinstance(result[0], ValueError)
        await once.get_or_run("a", work.do)
        assert work.done == 1

    run(story)


def test_an_abandoned_request_is_cancelled_or_undone() -> None:
    async def story() -> None:
        once, work, undone = ReplyCache(), Work(20), list[HttpReply]()

        async def undo(answer: HttpReply) -> None:
            undone.append(answer)

        caller = asyncio.create_task(once.get_or_run("a", work.do))
        await until(lambda: work.started)
        await once.abandon("a", undo)
        assert once.contains("a"), "a caller waits for it"
        caller.cancel()
        await asyncio.wait({caller})
        await once.abandon("a", undo)
        assert not once.contains("a") and work.done == 0 and undone == []
        work.seconds = 0
        await once.get_or_run("a", work.do)
        await once.abandon("a", undo)
        assert undone == [(200, bytes(10))]

    run(story)


def test_old_and_excess_replies_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("etude.store.http.reply_cache.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def story() -> None:
        soon, few, work = ReplyCache(ttl_s=2.0), ReplyCache(quota=CacheQuota(10**6, 1000)), Work()
        await soon.get_or_run("a", work.do)
        now[0] += 3.0
        await soon.get_or_run("b", work.do)
        assert not soon.contains("a") and soon.contains("b")
        for name in range(500):
            await few.get_or_run(name, work.do)
        assert [few.contains(name) for name in (0, 300, 450, 499)] == [False, False, True, True]

    run(story)
