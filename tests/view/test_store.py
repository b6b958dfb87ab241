"""The page of a rollout queue: open rollouts, runners and failures, while the store is served and after it stopped."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from etude.errors import StoreError
from etude.records import Outcome, Task
from etude.store import ResourcePut, open_store
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptReport, QueueOwner, RolloutLimits, RolloutRequest
from etude.view import changes
from etude.view.catalog import NOWHERE
from etude.view.changes import ChangeWatcher
from etude.view.run_reader import RunReader
from tests.store.servers import new_database
from tests.view.made import Viewer


async def play(queue: LocalRolloutQueue) -> None:
    """Play three rollouts with two runners, and leave one under way and two queued."""
    await queue.acquire_lease(QueueOwner("mine", "/runs/mine"))
    await queue.put_resource("endpoint", {"base_url": "http://127.0.0.1:1/v1", "model": "policy"})
    requests = [RolloutRequest(Task(task, {"prompt": "?"}), id=task) for task in range(4)]
    once = RolloutLimits(timeout_s=60, max_attempts=1)
    await queue.enqueue([*requests, RolloutRequest(Task(9, {"prompt": "?"}), id=9, use="val", limits=once)])
    for runner, outcome in (("one", Outcome.FAILED), ("two", Outcome.SUCCEEDED)):
        (claim,) = await queue.claim(runner, n=1, wait_s=5.0)
        error = "" if outcome is Outcome.SUCCEEDED else "\x1b[31mthe tool broke"
        await queue.finish(claim.attempt_id, AttemptReport(outcome, error, None if error else 1.0))
    await queue.claim("two", n=1, wait_s=5.0)


def test_a_queue_is_shown_while_it_is_served_and_after_it_stopped(tmp_path: Path) -> None:
    viewer, directory = Viewer(tmp_path), tmp_path / "store"
    directory.mkdir()

    async def serve() -> None:
        queue = LocalRolloutQueue(open_store(directory / "journal.sqlite"), Keyring.load_or_create(directory))
        await play(queue)
        page = await asyncio.to_thread(viewer.get, "store", run="store")
        assert (page["owner"], page["epoch"], page["model"]) == ("mine", 1, "policy")
        assert page["queue"] == {
            "use": ["training", "evaluation"],
            "queued": [2, 0],
            "preparing": [1, 0],
            "running": [0, 0],
        }
        assert page["runners"]["runner"] == ["one", "two"] and page["runners"]["running"] == [0, 1]
        assert page["runners"]["succeeded"] == [0, 1] and page["runners"]["others"] == ["1 failed", ""]
        assert page["attempts"]["rollout"] == [1] and page["attempts"]["runner"] == ["two"]
        assert page["attempts"]["use"] == ["training"]
        assert page["attempts"]["began"][0] >= page["runners"]["last_at"][0] > 0
        assert page["failures"]["rollout"] == [9] and page["failures"]["error"] == ["\x1b[31mthe tool broke"]
        assert page["warnings"] == ["1 of the last 2 attempts ended without success."]
        await queue.close()

    asyncio.run(serve())
    stopped = viewer.get("store", run="store")
    assert stopped["queue"]["queued"] == [2, 0] and stopped["attempts"]["rollout"] == [1]
    failures = viewer.ask("api/store?run=store&as=csv&table=failures").text
    assert "the tool broke" in failures and "\x1b" not in failures
    keys = [(directory / name).read_text().strip() for name in ("admin.key", "runner.key")]
    assert not any(key in viewer.ask("api/store?run=store").text for key in keys)


def test_a_queue_that_nobody_claims_from_is_warned_of(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    directory.mkdir()

    async def enqueue() -> None:
        queue = LocalRolloutQueue(open_store(directory / "journal.sqlite"))
        await queue.enqueue([RolloutRequest(Task(0, {"prompt": "?"}))])
        await queue.close()

    asyncio.run(enqueue())
    (warning,) = Viewer(tmp_path).get("store", run="store")["warnings"]
    assert warning.startswith("No attempt is under way, and queued rollouts wait (1)")


@pytest.mark.slow
def test_a_database_that_does_not_answer_holds_no_request_up() -> None:
    pytest.importorskip("psycopg")
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        address = f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/mine"
        reader, began = RunReader("queue", NOWHERE, address), time.monotonic()
        for _ in range(20):
            with pytest.raises(StoreError, match=r"could not be opened: .*timeout.*Check that the server runs"):
                _ = reader.journal
    assert time.monotonic() - began < 20, "with a connection for each request it takes twice as long"


@pytest.mark.integration
def test_a_queue_in_a_database_is_shown_also_after_its_connection_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    address = new_database()
    psycopg = pytest.importorskip("psycopg")
    monkeypatch.setattr(changes, "LOOK_S", 0.0)
    monkeypatch.setattr(changes, "PAUSE", 0.0)

    async def serve() -> None:
        queue = LocalRolloutQueue(open_store(address))
        await play(queue)
        await queue.close()

    asyncio.run(serve())
    viewer = Viewer(address)
    watcher = ChangeWatcher(viewer.catalog, asyncio.Event())
    (run,) = viewer.get("runs")["run"]
    page, stamp = viewer.get("store", run=run), watcher.stamp(run)
    assert page["queue"]["queued"] == [2, 0] and page["written_at"] == page["attempts"]["began"][0]
    with closing(psycopg.connect(address, autocommit=True)) as raw:
        raw.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    reply = viewer.ask(f"api/store?run={run}")
    assert reply.status_code == 422 and "could not be read" in reply.json()["error"]
    assert viewer.get("store", run=run) == page and watcher.stamp(run) == stamp
    with closing(open_store(address)) as journal:
        journal.append([ResourcePut("note", 1, {})])
    assert watcher.stamp(run) != stamp
    viewer.catalog.close()
