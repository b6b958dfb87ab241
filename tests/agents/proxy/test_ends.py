"""Calls of attempts that end, and clients that are slow, disconnect or read nothing: each is dropped at once or in
time."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from etude.agents.proxy.app import create_router
from etude.agents.proxy.slot_queue import SlotQueue
from etude.chat.tokenizer import Ids
from etude.images import PromptImages
from etude.records import Outcome, SamplingParams
from etude.rollout.request import Delta
from etude.store.http.server import create_app
from etude.store.queue.rollout_queue import AttemptReport
from tests.agents.proxy.test_faults import CALLS, CHAT, posted, scripted
from tests.agents.proxy.world import Scripted, World, chat_of, serving
from tests.waits import blocked_until


def test_an_attempt_that_ends_is_forgotten_at_once_and_its_calls_with_it() -> None:
    with serving(scripted(pause=0.0), chat_of()) as world:
        world.queue.on_attempts_ended(world.endpoint.forget_attempts)
        for _ in range(12):
            claim = world.attempt()
            assert posted(world, "/v1/chat/completions", CHAT, claim.model_key).status_code == 200
            world.do(world.queue.finish(claim.attempt_id, AttemptReport(Outcome.SUCCEEDED)))
        blocked_until(lambda: world.endpoint.metrics()["endpoint/attempts"] == 0)
    with serving(scripted("so " * 900, pause=30), chat_of()) as world, ThreadPoolExecutor(1) as pool:
        world.queue.on_attempts_ended(world.endpoint.forget_attempts)
        for end in ("finish", "cancel"):
            claim = world.attempt()
            call = pool.submit(posted, world, "/v1/chat/completions", CHAT, claim.model_key)
            blocked_until(lambda: world.endpoint.metrics()["endpoint/running"] == 1)
            if end == "finish":
                world.do(world.queue.finish(claim.attempt_id, AttemptReport(Outcome.SUCCEEDED)))
            else:
                world.do(world.queue.cancel([claim.attempt_id.rollout], "not needed"))
            answer = call.result(10)
            assert answer.status_code == 403 and "has ended" in answer.text
        metrics = world.endpoint.metrics()
        assert metrics["endpoint/running"] == metrics["endpoint/attempts"] == 0


def test_without_notifications_ended_attempts_are_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.agents.proxy.endpoint.UNNOTIFIED_SWEEP_S", 0.3)
    with (
        serving(scripted("so " * 900, pause=30), chat_of(), notified=False) as world,
        ThreadPoolExecutor(1) as pool,
    ):
        claim = world.attempt()
        call = pool.submit(posted, world, "/v1/chat/completions", CHAT, claim.model_key)
        blocked_until(lambda: world.endpoint.metrics()["endpoint/running"] == 1)
        world.do(world.queue.cancel([claim.attempt_id.rollout], "not needed"))
        answer = call.result(10)
        assert answer.status_code == 403 and "has ended" in answer.text


def test_a_call_that_is_cancelled_as_another_leaves_ends_as_cancelled() -> None:
    """The first call leaves while the next one in the queue is being cancelled. It must skip that one."""

    async def scene() -> None:
        gate, release = SlotQueue(1, 4), asyncio.Event()

        async def call(until: asyncio.Event | None) -> None:
            async with gate.acquire(1):
                if until is not None:
                    await until.wait()

        first = asyncio.create_task(call(release))
        await asyncio.sleep(0)
        waits = [asyncio.create_task(call(None)) for _ in range(3)]
        await asyncio.sleep(0)
        assert (gate.running, gate.waiting) == (1, 3)
        release.set()  # the first call leaves before the second learns of its cancellation
        waits[0].cancel()
        results = await asyncio.gather(first, *waits, return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["NoneType", "CancelledError", "NoneType", "NoneType"]
        assert (gate.running, gate.waiting) == (0, 0)

    asyncio.run(scene())


def test_a_request_that_is_slow_or_breaks_off_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("etude.store.http.request_limits.BODY_S", 0.5)
    monkeypatch.setattr("etude.store.http.request_limits.DRAINED_S", 0.2)
    caplog.set_level(logging.ERROR, "etude.agents")
    with serving(scripted(), chat_of()) as world:
        claim = world.attempt()
        host, _, port = world.root.removeprefix("http://").partition(":")
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {claim.model_key}\r\n"
            "content-length: 1000\r\n\r\n"
        )
        for breaks in (False, True):
            with socket.create_connection((host, int(port))) as connection:
                connection.settimeout(10)
                connection.sendall(head.encode() + b'{"model"')
                if not breaks:
                    assert b"did not arrive within 0.5 seconds" in _whole(connection)
        assert posted(world, "/v1/chat/completions", CHAT, claim.model_key).status_code == 200
        time.sleep(0.1)
    assert not caplog.records


def _whole(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(4096)
    return received


class Endless(Scripted):
    """An upstream whose answer never ends."""

    async def stream(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> AsyncGenerator[Delta, None]:
        completion = self._completion(prompt, sampling)
        one = completion.ids[:1], completion.logp[:1], completion.version[:1]
        while True:
            await asyncio.sleep(0)
            yield Delta(*one, "", None, None)


def test_a_client_that_reads_nothing_of_a_stream_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is open, but the client does not read. The tokens sampled so far are recorded."""
    monkeypatch.setattr("etude.agents.proxy.app.WRITE_TIMEOUT_S", 0.5)
    endless = Endless(chat_of().tokenizer, lambda _: "so")
    with serving(endless, chat_of(), held=4096, train=SamplingParams(max_tokens=10**6)) as world:
        claim = world.attempt()
        host, _, port = world.root.removeprefix("http://").partition(":")
        body = json.dumps({**CHAT, "stream": True})
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {claim.model_key}\r\n"
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            (turn,) = blocked_until(lambda: world.turns(claim.attempt_id), 60)
            assert turn.completion.finish_reason == "abort"
            blocked_until(lambda: world.endpoint.metrics()["endpoint/running"] == 0)
            assert not world.notes(claim.attempt_id)


def test_keys_of_the_store_and_of_the_model_do_not_open_each_other() -> None:
    """Both are served on one port, as in a run. Every route of the endpoint is in the table of the tests."""
    with serving(scripted(), chat_of()) as world:
        claim, ring, queue = world.attempt(), world.endpoint.keyring, world.queue
        routes = create_router(world.endpoint)
        both = create_app(queue, ring, routers=[routes])
        paths = {route.path for route in routes.routes if isinstance(route, Route) and route.name != "unknown"}
        assert paths == {*CALLS, "/v1/models", "/v1/models/{model}"}
        served = {route.path for route in both.routes if isinstance(route, Route)}
        stores = {path for path in served if path.startswith("/v1/store/")} | {"/v1/traces"}
        assert len(stores) > 15

        async def call_all() -> None:
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(both), base_url="http://both") as client:

                async def status(method: str, path: str, key: str | None, body: Any = None) -> int:
                    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
                    return (await client.request(method, path, headers=headers, json=body)).status_code

                for path in sorted(stores):
                    assert await status("POST", path, claim.model_key, {}) == 403, path
                    assert await status("POST", path, None, {}) == 401, path
                for path, body in CALLS.items():
                    for key in (ring.admin, ring.runner, claim.reward_key):
                        assert await status("POST", path, key, body) == 403, path
                    assert await status("POST", path, None, body) == 401, path
                for path in ("/v1/models", "/v1/models/policy"):
                    for key in (ring.admin, ring.runner, claim.reward_key):
                        assert await status("GET", path, key) == 403
                    assert await status("GET", path, None) == 401
                    assert await status("GET", path, claim.model_key) == 200

        world.do(call_all())


def test_the_endpoint_and_the_store_on_one_port_parse_long_bodies_on_one_thread() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("etude-aside")}

    with serving(scripted(), chat_of()) as world:
        claim, before = world.attempt(), threads()
        both = create_app(world.queue, world.endpoint.keyring, routers=[create_router(world.endpoint)])

        async def call_all() -> None:
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(both), base_url="http://both") as client:
                keys = {"authorization": f"Bearer {claim.reward_key}", "x-api-key": "none"}
                note = {"attempt": claim.attempt_id._asdict(), "name": "e", "data": "x" * 70_000}
                assert (await client.post("/v1/store/record_note", headers=keys, json=note)).status_code == 200
                keys = {"authorization": "Bearer none", "x-api-key": claim.model_key}
                call = {**CHAT, "messages": [{"role": "user", "content": "2+2?" + " " * 70_000}]}
                assert (await client.post("/v1/messages/count_tokens", headers=keys, json=call)).status_code == 200

        world.do(call_all())
        assert len(threads() - before) == 1


def test_calls_of_many_attempts_leave_no_task_and_no_thread_behind() -> None:
    with serving(scripted(pause=0.001), chat_of()) as world:
        world.queue.on_attempts_ended(world.endpoint.forget_attempts)

        def one(number: int) -> None:
            claim = world.attempt()
            headers = {"authorization": f"Bearer {claim.model_key}"}
            with httpx2.Client(timeout=20, headers=headers) as client:
                if number % 2:
                    assert client.post(f"{world.url}/chat/completions", json=CHAT).status_code == 200
                else:
                    with client.stream(
                        "POST", f"{world.url}/chat/completions", json={**CHAT, "stream": True}
                    ) as response:
                        next(response.iter_raw())
            world.do(world.queue.finish(claim.attempt_id, AttemptReport(Outcome.SUCCEEDED)))

        async def tasks() -> int:
            return len(asyncio.all_tasks())

        one(0)
        one(1)
        before, threads = _settled(world, tasks), threading.active_count()
        for number in range(8):
            one(number)
        assert _settled(world, tasks) <= before and threading.active_count() <= threads + 2
        assert world.endpoint.metrics()["endpoint/attempts"] == 0


def _settled(world: World, tasks: Any) -> int:
    """Return the number of asyncio tasks once it no longer changes."""
    seen = [world.do(tasks())]
    for _ in range(100):
        time.sleep(0.05)
        seen.append(world.do(tasks()))
        if len(seen) > 5 and len(set(seen[-5:])) == 1:
            break
    return int(seen[-1])
