"""Every request passes one middleware: no other route shares the exception of one, and no key exceeds its share."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import random
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest

from etude.store.http import request_limits as bounds
from etude.store.http.request_middleware import RequestMiddleware
from etude.store.queue.keys import Keyring
from etude.store.queue.rollout_queue import AttemptId
from tests.store.http.served import SECRET, Served, served
from tests.waits import until

PROTOBUF = "application/x-protobuf"
KEYRING = Keyring(SECRET)


@pytest.fixture(scope="module")
def store() -> Iterator[Served]:
    with served() as made:
        yield made


@pytest.mark.parametrize("path", ["/v1/store/record_note", "/v1/store/batch", "/v1/store/statistics"])
@pytest.mark.parametrize("form", [PROTOBUF, "Application/X-Protobuf; charset=utf-8", "text/plain"])
def test_another_content_type_does_not_bypass_the_count_of_json_values(store: Served, path: str, form: str) -> None:
    many = b'{"data":[' + b"[]," * 300_000 + b"[]]}"
    answer = store.ask(path, many, KEYRING.admin, content_type=form)
    assert answer.status_code == 413 and "more than 262144 values" in answer.json()["error"]["message"]
    deep = b'{"data":' + b"[" * 150 + b"]" * 150 + b"}"
    answer = store.ask(path, deep, KEYRING.admin, content_type=form)
    assert answer.status_code == 400 and "nested too deeply" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["content-type", "authorization", "x-api-key", "content-encoding"])
@pytest.mark.parametrize("path", ["/v1/store/statistics", "/healthz"])
def test_a_repeated_header_that_matters_is_refused(store: Served, name: str, path: str) -> None:
    given = {"content-type": "application/json", "authorization": f"Bearer {KEYRING.admin}", "x-api-key": KEYRING.admin}
    value = given.get(name, "identity")

    async def send(client: httpx2.AsyncClient) -> httpx2.Response:
        headers = [*given.items(), *[(name, value)] * (2 - (name in given))]
        if path == "/healthz":
            return await client.get(path, headers=headers)
        return await client.post(path, headers=headers, content=b"{}")

    answer = store.run(send)
    assert answer.status_code == 400, answer.text
    assert f"the header {name} 2 times; send it once" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {KEYRING.admin}", "x-api-key": "dummy"}, 200),
        ({"authorization": "Bearer dummy", "x-api-key": KEYRING.admin}, 200),
        ({"x-api-key": KEYRING.admin}, 200),
        ({"authorization": f"Basic {KEYRING.admin}"}, 401),
        ({"authorization": "Bearer dummy", "x-api-key": "dummy"}, 401),
    ],
)
def test_the_first_good_key_of_a_request_counts_everywhere(store: Served, headers: dict[str, str], status: int) -> None:
    for body in (b"{}", b" " * 70_000 + b"{}"):  # more than is read without a key
        answer = store.ask("/v1/store/statistics", body, **{"idempotency-key": "a", **headers})
        assert answer.status_code == status, answer.text


async def _answers(scope: Any, receive: Any, send: Any) -> None:
    """Return an app that reads the body."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class MiddlewareClient:
    """A client of the middleware in front of an app that only reads."""

    def __init__(self, max_bytes: int = bounds.BODY_BYTES) -> None:
        self.middleware = RequestMiddleware(_answers, "life", KEYRING.read_headers, max_bytes)
        self.client = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.middleware), base_url="http://middleware")

    def ask(self, key: str, content: bytes | AsyncIterator[bytes], **headers: str) -> asyncio.Task[int]:
        async def status() -> int:
            all_headers = {"authorization": f"Bearer {key}", **headers}
            return (await self.client.post("/", content=content, headers=all_headers)).status_code

        return asyncio.create_task(status())

    def held(self, key: str, size: int, come: asyncio.Event) -> asyncio.Task[int]:
        """Send a body without its end."""

        async def slow() -> AsyncIterator[bytes]:
            yield b" " * size
            await come.wait()
            yield b"1"

        return self.ask(key, slow())


def test_attempts_hold_half_of_the_memory_and_each_its_part_by_both_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    kib = 2**10
    monkeypatch.setattr(bounds, "HELD_BYTES", 800 * kib)
    monkeypatch.setattr(bounds, "HELD_BY_ATTEMPT", 200 * kib)
    monkeypatch.setattr(bounds, "DRAINED_S", 0.0)

    async def story() -> None:
        client, come = MiddlewareClient(), asyncio.Event()
        waits = []
        for number in (0, 1):
            for key in (KEYRING.reward_key(AttemptId(0, number), 60.0), KEYRING.model_key(AttemptId(0, number), 60.0)):
                waits.append(client.held(key, 95 * kib, come))
        held = client.middleware._buffered
        await until(lambda: held.bytes >= 4 * 95 * kib)
        assert await client.ask(KEYRING.model_key(AttemptId(0, 0), 60.0), b" " * 20 * kib) == 429, (
            "both keys are one owner"
        )
        assert await client.ask(KEYRING.model_key(AttemptId(0, 2), 60.0), b" " * 30 * kib) == 429, (
            "half is all that attempts get"
        )
        for key in (KEYRING.admin, KEYRING.runner):
            assert await client.ask(key, b" " * 300 * kib) == 200
        other = client.held(KEYRING.admin, 410 * kib, come)
        await until(lambda: held.bytes >= 790 * kib)
        for key in (KEYRING.admin, KEYRING.runner):
            assert await client.ask(key, b" " * 20 * kib) == 200, "what is small is always read"
            assert await client.ask(key, b" " * 300 * kib) == 429
        come.set()
        assert await asyncio.gather(*waits, other) == [200] * 5
        assert (held.bytes, held.attempts, dict(held.by)) == (0, 0, {})
        assert await client.ask(KEYRING.model_key(AttemptId(0, 0), 60.0), b" " * 150 * kib) == 200

    asyncio.run(story())


def test_a_model_request_of_the_greatest_size_has_room() -> None:
    assert bounds.BODY_BYTES < bounds.HELD_BY_ATTEMPT <= bounds.HELD_BYTES // 2
    assert bounds.HELD_BYTES // 2 + bounds.HELD_BY_ANONYMOUS < bounds.HELD_BYTES


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_one_body_of_each_attempt_at_a_time_waits_to_be_checked(encoding: str) -> None:
    body = b" " * 100_000 if encoding == "identity" else gzip.compress(b" " * 1_000_000)

    async def story() -> None:
        client, busy = MiddlewareClient(), threading.Event()
        thread = client.middleware._background._thread
        thread.submit(busy.wait)
        try:
            keys = [KEYRING.reward_key(AttemptId(0, number), 60.0) for number in (0, 1)]
            waits = [
                client.ask(key, body, **{"content-encoding": encoding})
                for key in [keys[0]] * 20 + [keys[1], KEYRING.admin]
            ]
            come = asyncio.Event()
            slow = client.held(keys[1], 100_000, come)  # a body that arrives slowly does not block others
            await until(lambda: thread._work_queue.qsize() == 3)
            for _ in range(20):  # others would follow
                await asyncio.sleep(0.002)
            assert thread._work_queue.qsize() == 3
        finally:
            busy.set()
        assert await asyncio.gather(*waits) == [200] * 22
        come.set()
        assert await slow == 200

    asyncio.run(story())


@pytest.fixture
def traced() -> Iterator[None]:
    """Trace allocations, without a collector of cycles that would hide what is held."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


GZIP = {"content-encoding": "gzip"}


def test_refused_bodies_are_not_held(traced: None) -> None:
    key, most = KEYRING.model_key(AttemptId(0, 0), 60.0), 2**18
    bomb = gzip.compress(bytes(10 * most))
    nested = b"[" * 200 + b" " * (most - 400) + b"]" * 200

    async def story() -> int:
        client = MiddlewareClient(max_bytes=most)
        assert await client.ask(key, bomb, **GZIP) == 413  # the first request makes what stays
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            assert await client.ask(key, bomb, **GZIP) == 413
            assert await client.ask(key, nested) == 400
        return tracemalloc.get_traced_memory()[0] - before

    assert asyncio.run(story()) < 2 * most, "40 bodies of this size were read"


def test_inflated_bytes_are_counted_before_they_exist(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 2**20
    monkeypatch.setattr(bounds, "HELD_BY_ATTEMPT", mib)
    key = KEYRING.model_key(AttemptId(0, 0), 60.0)
    bomb = gzip.compress(bytes(20 * mib))

    async def story() -> int:
        client = MiddlewareClient()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert await client.ask(key, bomb, **GZIP) == 429
        return tracemalloc.get_traced_memory()[1] - before

    assert asyncio.run(story()) < 4 * mib


def test_a_short_body_with_a_shared_key_is_read_compressed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HELD_BY_KEY", bounds.SHORT_BYTES)
    body = json.dumps([0] * 30_000).encode()
    assert len(body) < bounds.SHORT_BYTES

    async def story() -> None:
        client, come = MiddlewareClient(), asyncio.Event()
        other = client.held(KEYRING.runner, bounds.SHORT_BYTES, come)
        await until(lambda: client.middleware._buffered.bytes > 0)
        assert await client.ask(KEYRING.runner, body) == 200
        assert await client.ask(KEYRING.runner, gzip.compress(body), **GZIP) == 200
        come.set()
        await other

    asyncio.run(story())


def test_a_compressed_body_of_the_greatest_size_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    key = KEYRING.model_key(AttemptId(0, 0), 60.0)
    body = json.dumps([random.Random(0).randbytes(2**17).hex()]).encode()
    monkeypatch.setattr(bounds, "HELD_BY_ATTEMPT", len(body) + 1)
    received: list[bytes] = []

    async def keeps_body(scope: Any, receive: Any, send: Any) -> None:
        async def receive_kept() -> None:
            received.append((await receive())["body"])

        await _answers(scope, receive_kept, send)

    async def story() -> None:
        client = MiddlewareClient(max_bytes=len(body))
        client.middleware.app = keeps_body
        assert await client.ask(key, gzip.compress(body, 1), **GZIP) == 200
        assert client.middleware._buffered.bytes == 0

    asyncio.run(story())
    assert received == [body]


def test_the_thread_beside_the_loop_ends_with_the_server() -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("etude-aside")]

    before = set(threads())

    async def story() -> None:
        client = MiddlewareClient()
        assert await client.ask(KEYRING.admin, b" " * 100_000) == 200
        (own,) = set(threads()) - before

        async def nothing(*_: Any) -> None:
            return

        client.middleware.app = nothing
        await client.middleware({"type": "lifespan"}, nothing, nothing)  # it does nothing
        await asyncio.to_thread(own.join, 5)
        assert not own.is_alive()

    asyncio.run(story())
