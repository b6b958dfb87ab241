"""Failing machines: a database server that dies, a full disk, a clock that jumps, clients that send slowly.
Acknowledged writes are kept, waiting calls get an error, and the rest continues."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import etude
from etude.agents.runner import Runner
from etude.errors import InvalidKeyError, StoreError
from etude.records import Task
from etude.store import Status, open_store
from etude.store.http.client import WriteBatcher
from etude.store.http.remote_queue import RemoteRolloutQueue
from etude.store.http.request_middleware import RequestMiddleware
from etude.store.http.server import create_app, serve
from etude.store.journal import sql
from etude.store.queue.attempt_ends import INTERRUPTED
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptId, QueueOwner, RolloutLimits, RolloutQueue, RolloutRequest
from tests.agents.rollout_queues import QUICK
from tests.components import require
from tests.contracts.rollout_queues import claim, wanted
from tests.store.http.served import SECRET, waiting_claims
from tests.store.made import turn
from tests.store.queue.test_local_queue import DONE, with_queue
from tests.store.servers import ended, made_database, server, start_server
from tests.waits import until


def test_calls_that_wait_on_a_queue_without_its_journal_fail() -> None:
    """This includes calls made before the journal was lost, whose reply depends on later calls."""
    journal = open_store()

    async def story(queue: LocalRolloutQueue) -> None:
        waits = [asyncio.create_task(queue.claim("runner", 1, 60)), asyncio.create_task(queue.wait(0, 60))]
        await until(lambda: waiting_claims(queue) == len(queue._state._waits) == 1)

        def fails(*_: object) -> None:
            raise StoreError("there is nothing any more")

        for name in ("_commit", "iter_states"):
            setattr(journal, name, fails)
        with pytest.raises(StoreError, match="nothing any more"):
            await queue.enqueue(wanted(0))
        async with asyncio.timeout(10):
            claimed, waited = await asyncio.gather(*waits, return_exceptions=True)
            # It was about to get the rollout.
            assert isinstance(claimed, StoreError) and "nothing any more" in str(claimed)
            assert isinstance(waited, StoreError) and "The rollout queue stopped" in str(waited)
            with pytest.raises(StoreError, match="The rollout queue stopped"):
                await queue.claim("runner", 1, 60)

    with_queue(journal, story)


def test_a_claim_that_is_cancelled_on_a_closed_queue_is_cancelled() -> None:
    async def story() -> None:
        queue = LocalRolloutQueue(open_store())
        waits = asyncio.create_task(queue.claim("runner", 1, 60))
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(queue.close())
        await asyncio.sleep(0)
        waits.cancel()
        await closing
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(story())


def test_a_queue_that_a_run_takes_over_executes_rollouts_enqueued_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def before(queue: LocalRolloutQueue) -> None:
        await queue.enqueue(wanted(0, 3))
        (got,) = await claim(queue)
        await queue.record_turn(got.attempt_id, turn())

    async def after(queue: LocalRolloutQueue) -> None:
        assert await queue.claim("another", 3, 0) == []
        assert (await queue.statistics())["queued"] == 3, "they wait, to be asked for again"
        assert await queue.enqueue(wanted(0, 2)) == [0, 1]
        first, second = await queue.claim("another", 3, 1.0)
        assert (first.attempt_id, second.attempt_id) == (AttemptId(0, 1), AttemptId(1, 0))
        assert not await queue.finish(first.attempt_id._replace(attempt=0), DONE), "its word comes too late"
        for one in (first, second):
            assert await queue.finish(one.attempt_id, DONE)
        assert queue.journal.rollout(2).status is Status.QUEUED

    with closing(open_store(path)) as journal:
        with_queue(journal, before)
    with closing(open_store(path)) as journal:

        async def anew() -> None:
            queue = LocalRolloutQueue(journal)
            try:
                assert await queue.acquire_lease(QueueOwner("run", "here")) == 1
                await after(queue)
            finally:
                await queue.close()

        asyncio.run(anew())
        lost, played = journal.rollout(0).attempts
        assert (lost.status, lost.error, played.status) == (Status.INFRA_ERROR, INTERRUPTED, Status.SUCCEEDED)


# -- a database server ------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_database_server_that_dies_under_load_loses_nothing_and_ends_every_wait() -> None:
    """It dies as in a crash, and comes back; the journal is opened again, and the work goes on."""
    require("postgres")
    finished: set[int] = set()
    with server() as host:
        where = made_database(host, "run")
        journal = open_store(where)

        async def plays(queue: RolloutQueue, name: str) -> None:
            while True:
                for got in await queue.claim(name, 4, 30):
                    await queue.record_turn(got.attempt_id, turn())
                    await queue.finish(got.attempt_id, DONE)
                    finished.add(got.attempt_id.rollout)

        async def queues(queue: RolloutQueue, first: int) -> None:
            for task in range(first, first + 100_000):
                await queue.enqueue(wanted(task, 4))
                await asyncio.sleep(0.005)

        async def loaded(queue: RolloutQueue) -> None:
            works: list[Any] = [queues(queue, 0), *(plays(queue, name) for name in "abc")]
            tasks = [asyncio.create_task(work) for work in works]
            while len(finished) < 20:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(ended, host, signal.SIGQUIT)
            async with asyncio.timeout(60):
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    assert isinstance(result, StoreError)
            with pytest.raises(StoreError, match="Open the journal again"):
                await queue.enqueue(wanted(10**6))

        with_queue(journal, loaded)
        start_server(host)
        # The right to write was lost with the connection.
        with pytest.raises(StoreError, match="Open the journal again"):
            journal.rollouts()
        with closing(open_store(where)) as again:
            assert all(again.rollout(id).status is Status.SUCCEEDED for id in finished)
            with_queue(again, lambda queue: queue.enqueue(wanted(10**6)))


# -- a full disk ------------------------------------------------------------------------------------------------------


def test_a_runner_reports_its_attempts_once_a_full_disk_has_room_again(tmp_path: Path) -> None:
    """Clients that call over HTTP meanwhile get an error about the disk."""
    keyring = Keyring(SECRET)
    with closing(open_store(tmp_path / "journal.db")) as journal:
        assert isinstance(journal, sql.SqlJournal)
        ask = journal._connection.exec_driver_sql

        @etude.agent
        async def plays(task: Task) -> float:
            ask(f"PRAGMA max_page_count={ask('PRAGMA page_count').scalar()}")  # SQLite then meets its own full disk
            return 1.0

        async def story(queue: LocalRolloutQueue) -> None:
            await queue.enqueue([RolloutRequest(Task(0, {"prompt": "x" * 9000}), id=0)])
            runner = Runner(queue, plays, timeouts=QUICK)
            running = asyncio.create_task(runner.run())
            while ask("PRAGMA max_page_count").scalar() > 10**6:
                await asyncio.sleep(0.02)
            with serve(queue, keyring) as serving:
                elsewhere = RemoteRolloutQueue(serving.url, keyring.admin)
                with pytest.raises(StoreError, match="the disk is full: free some space and try again"):
                    while True:
                        await elsewhere.enqueue([RolloutRequest(Task(5, {"prompt": "x" * 20_000}))])
                await elsewhere.close()
            ask("PRAGMA max_page_count=10000000")
            _, (state,) = await queue.wait(0, 20)
            assert state.status is Status.SUCCEEDED and state.last is not None and state.last.total == 1.0
            runner.stop()
            await running

        with_queue(journal, story, keyring)


# -- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-(10.0**7), 10.0**7])
def test_a_clock_that_jumps_affects_keys_alone_and_no_limit(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """Limits use a monotonic clock. Keys expire by the wall clock, because they are used on other machines: a jump
    forward ends the keys of running attempts, but not those made afterwards."""
    keyring, real = Keyring(SECRET), time.time

    async def story(queue: LocalRolloutQueue) -> None:
        await queue.enqueue(
            wanted(0, 2, RolloutLimits(timeout_s=30, unresponsive_s=10, queue_timeout_s=30, max_attempts=1))
        )
        (got,) = await claim(queue)
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        for _ in range(4):
            await asyncio.sleep(0.02)
            assert await queue.heartbeat("runner", [got.attempt_id]) == []
        if jump > 0:
            for key in (got.model_key, got.reward_key):
                with pytest.raises(InvalidKeyError, match="expired"):
                    keyring.read(key)
        else:
            assert keyring.read(got.model_key).attempt_id == got.attempt_id
        (other,) = await claim(queue)
        assert (
            keyring.read(other.model_key).attempt_id == other.attempt_id
            and keyring.read(keyring.runner).scope == "runner"
        )
        assert await queue.finish(got.attempt_id, DONE) and await queue.finish(other.attempt_id, DONE)

    with closing(open_store()) as journal:
        with_queue(journal, story, keyring)


# -- clients ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[tuple[str, int, str]]:
    keyring, journal = Keyring(SECRET), open_store()
    queue = LocalRolloutQueue(journal, keyring)
    with serve(queue, keyring) as serving:
        host, _, port = serving.url.removeprefix("http://").rpartition(":")
        yield host, int(port), keyring.admin
    asyncio.run(queue.close())


def test_a_client_that_sends_its_head_slowly_is_disconnected_and_no_other(
    monkeypatch: pytest.MonkeyPatch, listening: tuple[str, int, str]
) -> None:
    monkeypatch.setattr("etude.store.http.request_limits.HEAD_S", 0.5)
    host, port, admin = listening

    def request(line: socket.socket) -> bytes:
        head = f"POST /v1/store/statistics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {admin}\r\ncontent-length: 2"
        line.sendall(f"{head}\r\n\r\n{{}}".encode())
        received = b""
        while not received.endswith(b"}}"):
            received += line.recv(4096)
        return received

    with (
        socket.create_connection((host, port)) as silent,
        socket.create_connection((host, port)) as slow,
        socket.create_connection((host, port)) as second,
        socket.create_connection((host, port)) as good,
    ):
        assert b"200 OK" in request(second) and b"200 OK" in request(good)
        began = time.monotonic()
        open_ = {slow, second}
        while open_ and time.monotonic() < began + 15:
            for line in list(open_):
                try:
                    line.sendall(b"P")
                except OSError:
                    open_.discard(line)
            time.sleep(0.05)
        assert not open_, "a client that never ends a head is read for ever"
        silent.settimeout(10)
        with suppress(ConnectionResetError):
            assert silent.recv(10) == b""
        assert b"200 OK" in request(good), "between two requests it is not"


def test_a_slow_body_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = Keyring(SECRET)
    monkeypatch.setattr("etude.store.http.request_limits.DRAINED_S", 0.2)

    async def story() -> None:
        queue = LocalRolloutQueue(open_store(), keyring)
        middleware = RequestMiddleware(create_app(queue, keyring), "life", keyring.read_headers, read_s=0.3)  # type: ignore[arg-type]  # any app
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.1)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        head = [(b"authorization", f"Bearer {keyring.admin}".encode()), (b"transfer-encoding", b"chunked")]
        scope = {"type": "http", "method": "POST", "path": "/v1/store/statistics", "headers": head}
        async with asyncio.timeout(10):
            await middleware(scope, receive, send)
        assert sent[0]["status"] == 408
        assert "did not arrive within 0.3 seconds" in json.loads(sent[1]["body"])["error"]["message"]
        await queue.close()

    asyncio.run(story())


def test_an_unreadable_reply_is_an_error_of_the_write() -> None:
    """A proxy in front of a server answers for it, with an unknown body."""

    class Odd:
        async def answer(self, verb: str, body: bytes) -> tuple[int, dict[str, Any]]:
            return 200, {"hello": verb, "size": len(body)}

    async def story() -> None:
        writer = WriteBatcher(Odd())  # the writer only calls `answer`
        async with asyncio.timeout(5):
            with pytest.raises(StoreError, match="its reply could not be read"):
                await writer.write(b"{}")

    asyncio.run(story())
