"""The rollout queues that share one contract, by name. Each is opened for a test, and closed after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import TypeAlias

import httpx2

from etude.records import Task
from etude.store import open_store
from etude.store.http.remote_queue import RemoteRolloutQueue
from etude.store.http.server import create_app, serve
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import Claim, RolloutLimits, RolloutPurpose, RolloutQueue, RolloutRequest
from tests.store.servers import new_database

Story: TypeAlias = Callable[[RolloutQueue], Awaitable[None]]
LONGEST_S = 60.0
"""The most seconds of a test's story on a busy machine."""


@asynccontextmanager
async def in_memory(_: Path) -> AsyncIterator[RolloutQueue]:
    """A queue whose journal ends with the test."""
    queue = LocalRolloutQueue(open_store())
    try:
        yield queue
    finally:
        await queue.close()


@asynccontextmanager
async def on_sqlite(directory: Path) -> AsyncIterator[RolloutQueue]:
    """A queue over a file."""
    with closing(open_store(directory / "journal.sqlite")) as journal:
        queue = LocalRolloutQueue(journal)
        try:
            yield queue
        finally:
            await queue.close()


@asynccontextmanager
async def on_postgres(_: Path) -> AsyncIterator[RolloutQueue]:
    """A queue over a separate database."""
    with closing(open_store(new_database())) as journal:
        queue = LocalRolloutQueue(journal)
        try:
            yield queue
        finally:
            await queue.close()


@asynccontextmanager
async def over_http(_: Path) -> AsyncIterator[RolloutQueue]:
    """A queue behind an app in this process, and a client of it."""
    keyring = Keyring()
    here = LocalRolloutQueue(open_store(), keyring)
    queue = RemoteRolloutQueue("http://store", keyring.admin, transport=httpx2.ASGITransport(create_app(here, keyring)))
    try:
        yield queue
    finally:
        await queue.close()
        await here.close()


@asynccontextmanager
async def over_a_socket(directory: Path) -> AsyncIterator[RolloutQueue]:
    """A queue over a file, served from a thread, and a client of it. Opened twice in one directory, it continues."""
    keyring = Keyring()
    async with on_sqlite(directory) as here:
        serving = serve(here, keyring)
        queue = RemoteRolloutQueue(serving.url, keyring.admin)
        try:
            yield queue
        finally:
            await queue.close()
            await asyncio.to_thread(serving.stop)


QUEUES: dict[str, Callable[[Path], AbstractAsyncContextManager[RolloutQueue]]] = {
    "memory": in_memory,
    "sqlite": on_sqlite,
    "http": over_http,
    "socket": over_a_socket,
    "postgres": on_postgres,
}


def play(name: str, directory: Path, story: Story) -> None:
    """Open a queue, and run a story on it."""

    async def whole() -> None:
        async with QUEUES[name](directory) as queue:
            await asyncio.wait_for(story(queue), LONGEST_S)

    asyncio.run(whole())


def wanted(
    task: int, size: int = 1, limits: RolloutLimits | None = None, use: RolloutPurpose = "train"
) -> list[RolloutRequest]:
    """Return the requests of a group, whose rollouts are named `task * size + sample`."""
    issued = Task(task, {"prompt": f"{task}+1?"}, "sums")
    limits = limits or RolloutLimits()
    return [RolloutRequest(issued, sample, task * size + sample, use, limits) for sample in range(size)]


async def claim(queue: RolloutQueue, n: int = 1, runner: str = "runner") -> list[Claim]:
    """Claim this many rollouts, which must be there."""
    claims = await queue.claim(runner, n, 10)
    assert len(claims) == n
    return claims


async def ended(queue: RolloutQueue, count: int, cursor: int = 0) -> Sequence[int]:
    """Wait for this many rollouts to end; return their ids."""
    ids: list[int] = []
    while len(ids) < count:
        cursor, states = await queue.wait(cursor, 20)
        assert states, f"only {ids} ended"
        ids += [state.id for state in states]
    return ids
