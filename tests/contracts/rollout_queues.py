"""The desks that keep one contract, by name: each is opened anew for a test, and closed after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import TypeAlias

import httpx2

from etude.records import Task
from etude.store import open_store
from etude.store.keys import Keyring
from etude.store.local_queue import LocalRolloutQueue
from etude.store.remote_queue import RemoteRolloutQueue
from etude.store.rollout_queue import Claim, RolloutLimits, RolloutQueue, RolloutRequest
from etude.store.server import create_app, serve
from tests.store.servers import new_database

Story: TypeAlias = Callable[[RolloutQueue], Awaitable[None]]
LONGEST_S = 60.0
"""No story takes longer than this, on a machine that is busy."""


@asynccontextmanager
async def in_memory(_: Path) -> AsyncIterator[RolloutQueue]:
    """A desk whose journal ends with the test."""
    desk = LocalRolloutQueue(open_store())
    try:
        yield desk
    finally:
        await desk.close()


@asynccontextmanager
async def on_sqlite(folder: Path) -> AsyncIterator[RolloutQueue]:
    """A desk over a file."""
    with closing(open_store(folder / "journal.sqlite")) as journal:
        desk = LocalRolloutQueue(journal)
        try:
            yield desk
        finally:
            await desk.close()


@asynccontextmanager
async def on_postgres(_: Path) -> AsyncIterator[RolloutQueue]:
    """A desk over a database of its own."""
    with closing(open_store(new_database())) as journal:
        desk = LocalRolloutQueue(journal)
        try:
            yield desk
        finally:
            await desk.close()


@asynccontextmanager
async def over_http(_: Path) -> AsyncIterator[RolloutQueue]:
    """A desk behind an app in this process, and a client of it."""
    ring = Keyring()
    here = LocalRolloutQueue(open_store(), ring)
    desk = RemoteRolloutQueue("http://store", ring.admin, transport=httpx2.ASGITransport(create_app(here, ring)))
    try:
        yield desk
    finally:
        await desk.close()
        await here.close()


@asynccontextmanager
async def over_a_socket(folder: Path) -> AsyncIterator[RolloutQueue]:
    """A desk over a file, served from a thread, and a client of it; opened twice in one folder, it goes on."""
    ring = Keyring()
    async with on_sqlite(folder) as here:
        serving = serve(here, ring)
        desk = RemoteRolloutQueue(serving.url, ring.admin)
        try:
            yield desk
        finally:
            await desk.close()
            await asyncio.to_thread(serving.stop)


DESKS: dict[str, Callable[[Path], AbstractAsyncContextManager[RolloutQueue]]] = {
    "memory": in_memory,
    "sqlite": on_sqlite,
    "http": over_http,
    "socket": over_a_socket,
    "postgres": on_postgres,
}


def play(name: str, folder: Path, story: Story) -> None:
    """Open a desk, and live through a story at it."""

    async def whole() -> None:
        async with DESKS[name](folder) as desk:
            await asyncio.wait_for(story(desk), LONGEST_S)

    asyncio.run(whole())


def wanted(task: int, size: int = 1, limits: RolloutLimits | None = None) -> list[RolloutRequest]:
    """A group of rollouts, named `task * size + sample`."""
    asked = Task(task, {"prompt": f"{task}+1?"}, "sums")
    limits = limits or RolloutLimits()
    return [RolloutRequest(asked, sample, task * size + sample, limits=limits) for sample in range(size)]


async def claim(desk: RolloutQueue, n: int = 1, runner: str = "runner") -> list[Claim]:
    """So many rollouts, which must be there."""
    claims = await desk.claim(runner, n, 10)
    assert len(claims) == n
    return claims


async def ended(desk: RolloutQueue, count: int, cursor: int = 0) -> Sequence[int]:
    """The next rollouts that come to their end."""
    ids: list[int] = []
    while len(ids) < count:
        cursor, states = await desk.wait(cursor, 20)
        assert states, f"only {ids} ended"
        ids += [state.id for state in states]
    return ids
