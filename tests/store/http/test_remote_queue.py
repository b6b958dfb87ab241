"""A remote rollout queue: a lost request is repeated, and nothing is executed twice."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest

from etude.errors import (
    ConfigError,
    DataError,
    IllegalTransitionError,
    InvalidKeyError,
    NotFoundError,
    RewardError,
    StoreError,
)
from etude.records import Outcome, Task
from etude.store.http.remote_queue import RemoteRolloutQueue
from etude.store.http.server import create_app, serve
from etude.store.queue.rollout_queue import AttemptId, AttemptReport, RolloutQuery, RolloutQueue, RolloutRequest
from tests.store.http.served import Served, served, waiting_claims
from tests.store.made import turn
from tests.waits import until

ROOT = Path(__file__).parents[3]
T = TypeVar("T")


class LossyTransport(httpx2.AsyncBaseTransport):
    """A transport to an app that loses some replies or requests."""

    def __init__(self, to: Any) -> None:
        self.inner = httpx2.ASGITransport(to)
        self.lose_answers = self.lose_requests = 0
        self.arrives = True
        """Whether a request whose answer gets lost is done."""
        self.sent: list[httpx2.Request] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.lose_requests:
            self.lose_requests -= 1
            raise httpx2.ConnectError("no server is there", request=request)
        self.sent.append(request)
        dead = httpx2.ReadError("the line went dead", request=request)
        if self.lose_answers and not self.arrives:
            self.lose_answers -= 1
            raise dead
        answer = await self.inner.handle_async_request(request)
        if self.lose_answers:
            self.lose_answers -= 1
            raise dead
        return answer


def visited(story: Callable[[Served, RemoteRolloutQueue, LossyTransport], Coroutine[Any, Any, T]], **options: Any) -> T:
    """Run a test on a remote queue."""
    with served() as store:
        transport = LossyTransport(store.app)
        queue = RemoteRolloutQueue("http://store", store.keyring.admin, transport=transport, **options)

        async def closing() -> T:
            try:
                return await story(store, queue, transport)
            finally:
                await queue.close()

        return asyncio.run(closing())


async def claimed(queue: RolloutQueue, n: int = 1) -> list[AttemptId]:
    await queue.enqueue([RolloutRequest(Task(place, {}), id=place) for place in range(n)])
    return [claim.attempt_id for claim in await queue.claim("r", n, 1.0)]


# -- lost requests ----------------------------------------------------------------------------------------------------


def test_a_request_lost_on_the_way_is_executed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.store.http.client.FIRST_BACKOFF_S", 0.005)

    async def story(store: Served, queue: RemoteRolloutQueue, transport: LossyTransport) -> None:
        async def lossy(work: Awaitable[T]) -> T:
            transport.lose_answers, transport.lose_requests = 2, 1
            return await work

        ids = await lossy(queue.enqueue([RolloutRequest(Task(0, {})), RolloutRequest(Task(1, {}))]))
        assert ids == [0, 1] and (await queue.statistics())["queued"] == 2
        (first,) = await lossy(queue.claim("r", 1, 1.0))
        assert first.attempt_id == AttemptId(0, 0) and (await queue.statistics())["running"] == 1
        await lossy(queue.ready(first.attempt_id))
        assert await lossy(queue.record_turn(first.attempt_id, turn())) == 0
        await lossy(queue.record_reward(first.attempt_id, 0.25, turn=0))
        await lossy(queue.record_note(first.attempt_id, "seen", [1]))
        assert await lossy(queue.put_resource("prompt", "hello")) == 1
        assert await lossy(queue.finish(first.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0)))
        (recorded,) = await lossy(queue.turns(0))
        assert recorded.reward == 0.25 and len(await queue.notes(0)) == 1
        assert (await lossy(queue.wait(0, 5.0)))[1][0].id == 0

    visited(story)


def test_a_request_lost_in_a_restart_is_not_executed_again() -> None:
    async def story(store: Served, queue: RemoteRolloutQueue, transport: LossyTransport) -> None:
        (key,) = await claimed(queue)

        async def restarted(work: Coroutine[Any, Any, T]) -> T:
            transport.lose_answers = 1
            task = asyncio.create_task(work)
            while transport.lose_answers:
                await asyncio.sleep(0.001)
            transport.inner = httpx2.ASGITransport(create_app(store.queue, store.keyring))
            return await task

        assert await queue.record_turn(key, turn(seed=1)) == 0
        assert await restarted(queue.record_turn(key, turn(seed=2))) == 1, "known again by its tokens"
        transport.arrives = False
        assert await restarted(queue.record_turn(key, turn(seed=3))) == 2, "that one never came"
        transport.arrives = True
        assert len(await queue.turns(0)) == 3
        with pytest.raises(StoreError, match="before the store was restarted"):
            await restarted(queue.record_reward(key, 1.0, turn=0))
        assert (await queue.turns(0))[0].reward == 1.0
        assert await restarted(queue.finish(key, AttemptReport(Outcome.FAILED, "it broke", 0.0)))
        assert (await queue.find(RolloutQuery())).rollouts[0].last is not None

    visited(story)


def test_the_first_request_may_be_lost_too() -> None:
    async def story(store: Served, queue: RemoteRolloutQueue, transport: LossyTransport) -> None:
        # The check that a server answers, and the result of the first write.
        transport.lose_requests, transport.lose_answers = 1, 2
        assert await queue.enqueue([RolloutRequest(Task(0, {}))]) == [0]
        assert (await queue.statistics())["queued"] == 1

    visited(story)


def test_a_request_that_never_arrived_is_sent_to_the_next_server() -> None:
    async def story(store: Served, queue: RemoteRolloutQueue, transport: LossyTransport) -> None:
        (key,) = await claimed(queue)
        transport.lose_requests = 2
        transport.inner = httpx2.ASGITransport(create_app(store.queue, store.keyring))
        assert await queue.record_turn(key, turn()) == 0

    visited(story)


def test_retries_end_with_a_sentence() -> None:
    async def story(store: Served, queue: RemoteRolloutQueue, transport: LossyTransport) -> None:
        transport.lose_requests = 10**9
        start = time.monotonic()
        for work in (queue.statistics(), queue.ready(AttemptId(0, 0))):
            with pytest.raises(StoreError, match=r"could not be reached for 0\.3 seconds.*no server is there"):
                await work
        assert time.monotonic() - start < 10.0
        transport.lose_requests = 0
        assert await queue.runners() == []

    visited(story, patience_s=0.3)


def test_a_server_that_does_not_answer_is_left() -> None:
    async def story() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        queue = RemoteRolloutQueue(f"http://127.0.0.1:{port}", "etude.admin.x", patience_s=0.5, timeout_s=0.2)
        start = time.monotonic()
        with pytest.raises(StoreError, match=r"did not answer|broke"):
            await queue.statistics()
        assert time.monotonic() - start < 20
        await queue.close()
        server.close()

    asyncio.run(story())


@pytest.mark.parametrize("body", [b"<html>", b'{"ok": true}'])
def test_a_server_that_is_no_store_is_detected(body: bytes) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": body})

    async def story() -> None:
        queue = RemoteRolloutQueue("http://elsewhere", "k", transport=httpx2.ASGITransport(other))
        with pytest.raises(StoreError, match="its reply is not that of a store"):
            await queue.statistics()

    asyncio.run(story())


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_refusal_raises_the_error_of_the_server() -> None:
    async def story(store: Served, queue: RemoteRolloutQueue, transport: LossyTransport) -> None:
        (key,) = await claimed(queue)
        await queue.finish(key, AttemptReport(Outcome.SUCCEEDED))
        with pytest.raises(IllegalTransitionError, match=r"succeeded.*failed"):
            await queue.finish(key, AttemptReport(Outcome.FAILED))
        with pytest.raises(DataError, match="unpaired surrogate"):
            await queue.claim("runner-\ud800", 1, 0.0)
        with pytest.raises(NotFoundError):
            await queue.turns(99)
        with pytest.raises(RewardError):
            await queue.record_reward(key, float("nan"))
        with pytest.raises(RewardError):
            await queue.record_reward(key, {})
        with pytest.raises(DataError, match="limit"):
            await queue.find(RolloutQuery(limit=0))
        with pytest.raises(DataError, match="journal cannot store"):
            await queue.record_note(key, "odd", object())
        for bad in (store.keyring.model_key(key, 60.0), "wrong", store.keyring.reward_key(key, -1.0)):
            refused = RemoteRolloutQueue("http://store", bad, transport=transport)
            for work in (refused.statistics(), refused.finish(key, AttemptReport(Outcome.SUCCEEDED))):
                with pytest.raises(InvalidKeyError):
                    await work

    visited(story)


@pytest.mark.parametrize(
    ("url", "key", "options", "error"),
    [
        ("store:8700", "k", {}, ConfigError),
        ("ftp://store", "k", {}, ConfigError),
        ("http://me:secret@store", "k", {}, ConfigError),
        ("http://store", "k", {"patience_s": 500.0}, ConfigError),
        ("http://store", "", {}, InvalidKeyError),
        ("http://store", "a\nb", {}, InvalidKeyError),
    ],
)
def test_an_invalid_address_or_key_is_refused_at_once(url: str, key: str, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        RemoteRolloutQueue(url, key, **options)
    assert "secret" not in str(raised.value)


# -- batches ----------------------------------------------------------------------------------------------------------


def test_concurrent_writes_are_batched_and_large_bodies_compressed() -> None:
    async def story(store: Served, queue: RemoteRolloutQueue, transport: LossyTransport) -> None:
        keys = await claimed(queue, 200)
        transport.sent.clear()
        ended = [queue.finish(key, AttemptReport(Outcome.SUCCEEDED, reward=float(key.rollout))) for key in keys]
        assert all(await asyncio.gather(*ended)) and len(transport.sent) <= 3
        states = (await queue.find(RolloutQuery(limit=1000))).rollouts
        assert [state.last.reward for state in states if state.last] == [float(key.rollout) for key in keys]
        transport.sent.clear()
        await queue.record_note(keys[0], "long", "word " * 100_000)
        (sent,) = transport.sent
        assert sent.headers["content-encoding"] == "gzip" and len(sent.content) < 50_000
        assert len((await queue.notes(0))[0]["data"]) == 500_000

    visited(story)


def test_a_write_right_after_the_last_reply_is_not_forgotten() -> None:
    """Both senders have just received a reply, have nothing more to send, and have not ended yet."""

    class Together(LossyTransport):
        both = asyncio.Barrier(2)
        met = 0

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            answer = await super().handle_async_request(request)
            if request.url.path.endswith("batch") and self.met < 2:
                self.met += 1
                await self.both.wait()
            return answer

    async def story(store: Served, queue: RemoteRolloutQueue) -> None:
        first, second = await claimed(queue, 2)

        async def writes(key: AttemptId, times: int, after: int) -> None:
            await until(lambda: transport.met == after)  # so that each has a separate request
            for _ in range(times):
                await queue.record_note(key, "again", None)

        async with asyncio.timeout(20):
            await asyncio.gather(writes(first, 2, 0), writes(second, 1, 1))
        await queue.close()

    with served() as store:
        transport = Together(store.app)
        asyncio.run(story(store, RemoteRolloutQueue("http://store", store.keyring.admin, transport=transport)))


def test_an_invalid_write_does_not_fail_the_others_of_its_batch() -> None:
    async def story(store: Served, queue: RemoteRolloutQueue, transport: LossyTransport) -> None:
        keys = await claimed(queue, 4)
        works = [queue.record_note(key, "" if key.rollout == 2 else "fine", None) for key in keys]
        done = await asyncio.gather(*works, return_exceptions=True)
        assert [type(one) for one in done] == [type(None), type(None), DataError, type(None)]
        works = [queue.record_note(key, "x", "y" * 33 * 2**20 if key.rollout == 1 else None) for key in keys]
        done = await asyncio.gather(*works, return_exceptions=True)
        assert [type(one) for one in done] == [type(None), StoreError, type(None), type(None)]
        works = [queue.record_note(key, "x", ["\ud800"] if key.rollout == 3 else None) for key in keys]
        done = await asyncio.gather(*works, return_exceptions=True)
        assert [type(one) for one in done] == [type(None), type(None), type(None), DataError]
        assert [len(await queue.notes(key.rollout)) for key in keys] == [3, 2, 2, 2]
        assert await queue.finish(keys[0], AttemptReport(Outcome.FAILED, "no file 'caf\udce9.txt'"))
        (ended,) = (await queue.find(RolloutQuery(ids=(0,)))).rollouts
        assert ended.attempts[-1].error == r"no file 'caf\udce9.txt'"

    visited(story)


def test_a_write_is_sent_even_if_its_caller_was_cancelled() -> None:
    async def story(store: Served, queue: RemoteRolloutQueue, transport: LossyTransport) -> None:
        keys = await claimed(queue, 3)
        tasks = [asyncio.create_task(queue.record_note(key, "seen", None)) for key in keys]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [len(await queue.notes(key.rollout)) for key in keys] == [1, 1, 1]

    visited(story)


# -- over a socket ----------------------------------------------------------------------------------------------------


def test_a_remote_queue_serves_several_event_loops_and_survives_a_restart() -> None:
    with served() as store:
        first = serve(store.queue, store.keyring)
        port = int(first.url.rpartition(":")[2])
        queue = RemoteRolloutQueue(first.url, store.keyring.admin)

        async def notes(n: int) -> None:
            for place in range(n):
                await queue.record_note(AttemptId(0, 0), "seen", place)
                await asyncio.sleep(0.01)
            await queue.close()

        asyncio.run(claimed(queue))
        threads = [threading.Thread(target=asyncio.run, args=(notes(30),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        first.stop()
        time.sleep(0.1)
        with serve(store.queue, store.keyring, port=port):
            for thread in threads:
                thread.join(20)
            assert len(asyncio.run(queue.notes(0))) >= 60


def test_a_cancelled_claim_takes_no_rollout() -> None:
    with served() as store, serve(store.queue, store.keyring) as serving:

        async def story() -> dict[str, float]:
            queue = RemoteRolloutQueue(serving.url, store.keyring.runner)
            for _ in range(3):
                claim = asyncio.create_task(queue.claim("r", 1, 20.0))
                await until(lambda: waiting_claims(store.queue) == 1)
                claim.cancel()
                await until(lambda: waiting_claims(store.queue) == 0)
            await store.queue.enqueue([RolloutRequest(Task(0, {}))])
            statistics = await store.queue.statistics()
            await queue.close()
            return statistics

        statistics = asyncio.run(story())
        assert (statistics["queued"], statistics["running"]) == (1, 0)


def test_the_client_needs_no_server_and_no_database() -> None:
    names = ("fastapi", "starlette", "uvicorn", "sqlalchemy", "torch", "opentelemetry", "pydantic")
    program = f"import sys, etude.store.http.remote_queue; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
