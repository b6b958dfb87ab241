"""A desk behind its app, asked in this process; and small words for the requests that the tests of the server make."""

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
from etude.store.keys import Keyring
from etude.store.local_queue import LocalRolloutQueue
from etude.store.rollout_queue import AttemptReport, Claim, RolloutRequest
from etude.store.server import create_app

T = TypeVar("T")
SECRET = b"a secret of sixteen bytes or more"


@dataclass
class Served:
    """A desk, its keys and the app before it."""

    journal: Journal
    ring: Keyring
    desk: LocalRolloutQueue
    app: FastAPI

    def ask(
        self, path: str, body: Any = None, key: str | None = None, *, method: str = "POST", **headers: str
    ) -> httpx2.Response:
        """One request; what is not bytes goes as JSON, and underscores in the names of headers are dashes."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named |= {} if key is None else {"authorization": f"Bearer {key}"}

        async def asked(client: httpx2.AsyncClient) -> httpx2.Response:
            return await client.request(method, path, content=content, headers=named)

        return self.run(asked)

    def verb(self, name: str, body: Any = None, **headers: str) -> httpx2.Response:
        """One verb, with the admin key."""
        return self.ask(f"/v1/store/{name}", {} if body is None else body, self.ring.admin, **headers)

    def run(self, work: Callable[[httpx2.AsyncClient], Awaitable[T]]) -> T:
        """What is done with a client of the app."""

        async def inside() -> T:
            transport = httpx2.ASGITransport(self.app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://store") as client:
                return await work(client)

        return asyncio.run(inside())

    def claimed(self, n: int = 1) -> list[Claim]:
        """Rollouts queued and claimed."""

        async def claim() -> list[Claim]:
            first = self.journal.position  # grows with each task, so that no ordinal is used twice
            await self.desk.enqueue([RolloutRequest(Task(first + i, {"prompt": "2+2?"})) for i in range(n)])
            return await self.desk.claim("runner", n, 1.0)

        return asyncio.run(claim())

    def ended(self, claim: Claim) -> None:
        """It succeeds."""
        asyncio.run(self.desk.finish(claim.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0)))


@contextmanager
def served(**options: Any) -> Iterator[Served]:
    """A desk over a journal in memory, behind an app with these options."""
    ring = Keyring(SECRET)
    journal = open_store()
    desk = LocalRolloutQueue(journal, ring)
    try:
        yield Served(journal, ring, desk, create_app(desk, ring, **options))
    finally:
        asyncio.run(desk.close())
        journal.close()
