"""A desk that is elsewhere: what is lost on the way is asked again, and nothing is done twice."""

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
from etude.store.remote_queue import RemoteRolloutQueue
from etude.store.rollout_queue import AttemptId, AttemptReport, RolloutQuery, RolloutQueue, RolloutRequest
from etude.store.server import create_app, serve
from tests.store.made import turn
from tests.store.served import Served, served

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


class Road(httpx2.AsyncBaseTransport):
    """A way to an app on which answers, or requests, get lost as often as is said."""

    def __init__(self, to: Any) -> None:
        self.way = httpx2.ASGITransport(to)
        self.lose_answers = self.lose_requests = 0
        self.arrives = True
        """Whether a request whose answer gets lost is done."""
        self.sent: list[httpx2.Request] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.lose_requests:
            self.lose_requests -= 1
            raise httpx2.ConnectError("nobody is there", request=request)
        self.sent.append(request)
        dead = httpx2.ReadError("the line went dead", request=request)
        if self.lose_answers and not self.arrives:
            self.lose_answers -= 1
            raise dead
        answer = await self.way.handle_async_request(request)
        if self.lose_answers:
            self.lose_answers -= 1
            raise dead
        return answer


def visited(story: Callable[[Served, RemoteRolloutQueue, Road], Coroutine[Any, Any, T]], **options: Any) -> T:
    """A story of a remote desk."""
    with served() as store:
        road = Road(store.app)
        desk = RemoteRolloutQueue("http://store", store.ring.admin, transport=road, **options)

        async def told() -> T:
            try:
                return await story(store, desk, road)
            finally:
                await desk.close()

        return asyncio.run(told())


async def claimed(desk: RolloutQueue, n: int = 1) -> list[AttemptId]:
    await desk.enqueue([RolloutRequest(Task(place, {}), id=place) for place in range(n)])
    return [claim.attempt_id for claim in await desk.claim("r", n, 1.0)]


# -- what is lost -----------------------------------------------------------------------------------------------------


def test_what_was_lost_on_the_way_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.store.store_client.FIRST_BACKOFF_S", 0.005)

    async def story(store: Served, desk: RemoteRolloutQueue, road: Road) -> None:
        async def lossy(work: Awaitable[T]) -> T:
            road.lose_answers, road.lose_requests = 2, 1
            return await work

        ids = await lossy(desk.enqueue([RolloutRequest(Task(0, {})), RolloutRequest(Task(1, {}))]))
        assert ids == [0, 1] and (await desk.statistics())["queued"] == 2
        (first,) = await lossy(desk.claim("r", 1, 1.0))
        assert first.attempt_id == AttemptId(0, 0) and (await desk.statistics())["running"] == 1
        await lossy(desk.mark_ready(first.attempt_id))
        assert await lossy(desk.record_turn(first.attempt_id, turn())) == 0
        await lossy(desk.record_reward(first.attempt_id, 0.25, turn=0))
        await lossy(desk.record_note(first.attempt_id, "seen", [1]))
        assert await lossy(desk.put_resource("prompt", "hello")) == 1
        assert await lossy(desk.finish(first.attempt_id, AttemptReport(Outcome.SUCCEEDED, reward=1.0)))
        (said,) = await lossy(desk.turns(0))
        assert said.reward == 0.25 and len(await desk.notes(0)) == 1
        assert (await lossy(desk.wait(0, 5.0)))[1][0].id == 0

    visited(story)


def test_what_was_lost_in_a_restart_is_not_added_again() -> None:
    async def story(store: Served, desk: RemoteRolloutQueue, road: Road) -> None:
        (key,) = await claimed(desk)

        async def restarted(work: Coroutine[Any, Any, T]) -> T:
            road.lose_answers = 1
            task = asyncio.create_task(work)
            while road.lose_answers:
                await asyncio.sleep(0.001)
            road.way = httpx2.ASGITransport(create_app(store.desk, store.ring))
            return await task

        assert await desk.record_turn(key, turn(seed=1)) == 0
        assert await restarted(desk.record_turn(key, turn(seed=2))) == 1, "known again by its tokens"
        road.arrives = False
        assert await restarted(desk.record_turn(key, turn(seed=3))) == 2, "that one never came"
        road.arrives = True
        assert len(await desk.turns(0)) == 3
        with pytest.raises(StoreError, match="before the store was restarted"):
            await restarted(desk.record_reward(key, 1.0, turn=0))
        assert (await desk.turns(0))[0].reward == 1.0
        assert await restarted(desk.finish(key, AttemptReport(Outcome.FAILED, "it broke", 0.0)))
        assert (await desk.find(RolloutQuery())).rollouts[0].last is not None

    visited(story)


def test_the_first_of_all_may_get_lost_too() -> None:
    async def story(store: Served, desk: RemoteRolloutQueue, road: Road) -> None:
        road.lose_requests, road.lose_answers = 1, 2  # that it is there, and what came of the first writing
        assert await desk.enqueue([RolloutRequest(Task(0, {}))]) == [0]
        assert (await desk.statistics())["queued"] == 1

    visited(story)


def test_what_never_arrived_is_sent_to_whoever_is_there_next() -> None:
    async def story(store: Served, desk: RemoteRolloutQueue, road: Road) -> None:
        (key,) = await claimed(desk)
        road.lose_requests = 2
        road.way = httpx2.ASGITransport(create_app(store.desk, store.ring))
        assert await desk.record_turn(key, turn()) == 0

    visited(story)


def test_patience_ends_with_a_sentence() -> None:
    async def story(store: Served, desk: RemoteRolloutQueue, road: Road) -> None:
        road.lose_requests = 10**9
        start = time.monotonic()
        for work in (desk.statistics(), desk.mark_ready(AttemptId(0, 0))):
            with pytest.raises(StoreError, match=r"could not be reached for 0\.3 seconds.*nobody is there"):
                await work
        assert time.monotonic() - start < 2.0
        road.lose_requests = 0
        assert await desk.runners() == []

    visited(story, patience_s=0.3)


def test_a_server_that_does_not_answer_is_left() -> None:
    async def story() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        desk = RemoteRolloutQueue(f"http://127.0.0.1:{port}", "etude.admin.x", patience_s=0.5, timeout_s=0.2)
        start = time.monotonic()
        with pytest.raises(StoreError, match=r"did not answer|broke"):
            await desk.statistics()
        assert time.monotonic() - start < 5.0
        await desk.close()
        server.close()

    asyncio.run(story())


def test_a_server_of_others_is_told_from_ours() -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": b"<html>"})

    async def story() -> None:
        desk = RemoteRolloutQueue("http://elsewhere", "k", transport=httpx2.ASGITransport(other))
        with pytest.raises(StoreError, match="its reply is not that of a store"):
            await desk.statistics()

    asyncio.run(story())


# -- what is refused --------------------------------------------------------------------------------------------------


def test_refusals_come_back_as_what_they_are() -> None:
    async def story(store: Served, desk: RemoteRolloutQueue, road: Road) -> None:
        (key,) = await claimed(desk)
        await desk.finish(key, AttemptReport(Outcome.SUCCEEDED))
        with pytest.raises(IllegalTransitionError, match=r"succeeded.*failed"):
            await desk.finish(key, AttemptReport(Outcome.FAILED))
        with pytest.raises(NotFoundError):
            await desk.turns(99)
        with pytest.raises(RewardError):
            await desk.record_reward(key, float("nan"))
        with pytest.raises(RewardError):
            await desk.record_reward(key, {})
        with pytest.raises(DataError, match="limit"):
            await desk.find(RolloutQuery(limit=0))
        with pytest.raises(DataError, match="journal cannot store"):
            await desk.record_note(key, "odd", object())
        for bad in (store.ring.model_key(key, 60.0), "wrong", store.ring.reward_key(key, -1.0)):
            refused = RemoteRolloutQueue("http://store", bad, transport=road)
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
def test_what_cannot_work_is_refused_at_once(url: str, key: str, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as told:
        RemoteRolloutQueue(url, key, **options)
    assert "secret" not in str(told.value)


# -- what travels together --------------------------------------------------------------------------------------------


def test_what_is_written_meanwhile_travels_together_and_large_bodies_are_compressed() -> None:
    async def story(store: Served, desk: RemoteRolloutQueue, road: Road) -> None:
        keys = await claimed(desk, 200)
        road.sent.clear()
        ended = [desk.finish(key, AttemptReport(Outcome.SUCCEEDED, reward=float(key.rollout))) for key in keys]
        assert all(await asyncio.gather(*ended)) and len(road.sent) <= 3
        states = (await desk.find(RolloutQuery(limit=1000))).rollouts
        assert [state.last.reward for state in states if state.last] == [float(key.rollout) for key in keys]
        road.sent.clear()
        await desk.record_note(keys[0], "long", "word " * 100_000)
        (sent,) = road.sent
        assert sent.headers["content-encoding"] == "gzip" and len(sent.content) < 50_000
        assert len((await desk.notes(0))[0]["data"]) == 500_000

    visited(story)


def test_who_writes_as_soon_as_the_last_was_answered_is_not_forgotten() -> None:
    """Both of those that sent have just heard, have nothing more to send, and are not over yet."""

    class Together(Road):
        both = asyncio.Barrier(2)
        met = 0

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            answer = await super().handle_async_request(request)
            if request.url.path.endswith("batch") and self.met < 2:
                self.met += 1
                await self.both.wait()
            return answer

    async def story(store: Served, desk: RemoteRolloutQueue) -> None:
        first, second = await claimed(desk, 2)

        async def writes(key: AttemptId, times: int, after: float) -> None:
            await asyncio.sleep(after)  # so that each has a request of its own
            for _ in range(times):
                await desk.record_note(key, "again", None)

        async with asyncio.timeout(20):
            await asyncio.gather(writes(first, 2, 0.0), writes(second, 1, 0.1))
        await desk.close()

    with served() as store:
        asyncio.run(story(store, RemoteRolloutQueue("http://store", store.ring.admin, transport=Together(store.app))))


def test_one_that_is_ill_formed_does_not_fail_the_others() -> None:
    async def story(store: Served, desk: RemoteRolloutQueue, road: Road) -> None:
        keys = await claimed(desk, 4)
        works = [desk.record_note(key, "" if key.rollout == 2 else "fine", None) for key in keys]
        done = await asyncio.gather(*works, return_exceptions=True)
        assert [type(one) for one in done] == [type(None), type(None), DataError, type(None)]
        works = [desk.record_note(key, "x", "y" * 33 * 2**20 if key.rollout == 1 else None) for key in keys]
        done = await asyncio.gather(*works, return_exceptions=True)
        assert [type(one) for one in done] == [type(None), StoreError, type(None), type(None)]
        assert [len(await desk.notes(key.rollout)) for key in keys] == [2, 1, 1, 2]

    visited(story)


def test_a_writing_goes_out_even_if_nobody_waits_for_it_any_more() -> None:
    async def story(store: Served, desk: RemoteRolloutQueue, road: Road) -> None:
        keys = await claimed(desk, 3)
        tasks = [asyncio.create_task(desk.record_note(key, "seen", None)) for key in keys]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [len(await desk.notes(key.rollout)) for key in keys] == [1, 1, 1]

    visited(story)


# -- over a socket ----------------------------------------------------------------------------------------------------


def test_a_desk_serves_several_event_loops_and_survives_a_restart() -> None:
    with served() as store:
        first = serve(store.desk, store.ring)
        port = int(first.url.rpartition(":")[2])
        desk = RemoteRolloutQueue(first.url, store.ring.admin)

        async def notes(n: int) -> None:
            for place in range(n):
                await desk.record_note(AttemptId(0, 0), "seen", place)
                await asyncio.sleep(0.01)
            await desk.close()

        asyncio.run(claimed(desk))
        threads = [threading.Thread(target=asyncio.run, args=(notes(30),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        first.stop()
        time.sleep(0.1)
        with serve(store.desk, store.ring, port=port):
            for thread in threads:
                thread.join(20)
            assert len(asyncio.run(desk.notes(0))) >= 60


def test_a_claim_that_is_cancelled_takes_nothing() -> None:
    with served() as store, serve(store.desk, store.ring) as serving:

        async def story() -> dict[str, float]:
            desk = RemoteRolloutQueue(serving.url, store.ring.runner)
            for _ in range(3):
                claim = asyncio.create_task(desk.claim("r", 1, 20.0))
                await asyncio.sleep(0.1)
                claim.cancel()
            await asyncio.sleep(0.2)
            await store.desk.enqueue([RolloutRequest(Task(0, {}))])
            await asyncio.sleep(0.2)
            told = await store.desk.statistics()
            await desk.close()
            return told

        told = asyncio.run(story())
        assert (told["queued"], told["running"]) == (1, 0)


def test_the_client_needs_no_server_and_no_database() -> None:
    names = ("fastapi", "starlette", "uvicorn", "sqlalchemy", "torch", "opentelemetry")
    program = f"import sys, etude.store.remote_queue; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
