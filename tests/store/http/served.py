"""A rollout queue behind its app, called in this process, with helpers for the requests of the server's tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
from fastapi import FastAPI

from etude.records import Outcome, Task
from etude.store import Journal, open_store
from etude.store.http.server import create_app
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptReport, Claim, RolloutRequest

T = TypeVar("T")
SECRET = "a-secret-of-sixteen-letters-or-more"


@dataclass
class Served:
    """A rollout queue, its keys and the app in front of it."""

    journal: Journal
    keyring: Keyring
    queue: LocalRolloutQueue
    app: FastAPI

    def ask(
        self, path: str, body: Any = None, key: str | None = None, *, method: str = "POST", **headers: str
    ) -> httpx2.Response:
        """Send one request. A body that is not bytes is sent as JSON; underscores in header names become dashes."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named |= {} if key is None else {"authorization": f"Bearer {key}"}

        async def send(client: httpx2.AsyncClient) -> httpx2.Response:
            return await client.request(method, path, content=content, headers=named)

        return self.run(send)

    def verb(self, name: str, body: Any = None, **headers: str) -> httpx2.Response:
        """Call one verb with the admin key."""
        return self.ask(f"/v1/store/{name}", {} if body is None else body, self.keyring.admin, **headers)

    def run(self, work: Callable[[httpx2.AsyncClient], Awaitable[T]]) -> T:
        """Run a function with a client of the app."""

        async def inside() -> T:
            transport = httpx2.ASGITransport(self.app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://store") as client:
                return await work(client)

        return asyncio.run(inside())

    def claimed(self, n: int = 1) -> list[Claim]:
        """Queue and claim rollouts."""

        async def claim() -> list[Claim]:
            first = self.journal.position  # grows with each task, so that no ordinal is used twice
            await self.queue.enqueue([RolloutRequest(Task(first + i, {"prompt": "2+2?"})) for i in range(n)])
            return await self.queue.claim("runner", n, 1.0)

        return asyncio.run(claim())

    def ended(self, claim: Claim) -> None:
        """Let an attempt succeed."""
        asyncio.run(self.queue.finish(claim.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0)))


def waiting_claims(queue: LocalRolloutQueue) -> int:
    """Return the number of claims that wait for a rollout."""
    return sum(not claim.is_cancelled for claim in list(queue._state._claims))


@contextmanager
def served(**options: Any) -> Iterator[Served]:
    """Serve a queue over a journal in memory from an app with these options."""
    keyring = Keyring(SECRET)
    journal = open_store()
    queue = LocalRolloutQueue(journal, keyring)
    try:
        yield Served(journal, keyring, queue, create_app(queue, keyring, **options))
    finally:
        asyncio.run(queue.close())
        journal.close()
