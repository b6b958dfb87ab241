"""Runners in processes: they join a server by its address, are restarted after a kill, and are never left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import etude
from etude.agents.agent import load_agent
from etude.agents.execution.processes import ProcessRunners
from etude.agents.execution.runner_process import join_store
from etude.errors import AgentError, ConfigError
from etude.records import Task
from etude.store import open_store
from etude.store.http.server import serve
from etude.store.journal.states import Status
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutLimits
from tests.agents.execution import played
from tests.agents.execution.test_threads import through
from tests.agents.rollout_queues import QUICK, wanted
from tests.processes import gone
from tests.waits import blocked_until as until


class Place:
    """A rollout queue with a server."""

    def __init__(self, queue: LocalRolloutQueue, url: str) -> None:
        self.queue, self.url = queue, url
        self.key = queue.keyring.runner


@pytest.fixture
def place() -> Iterator[Place]:
    queue = LocalRolloutQueue(open_store())
    with serve(queue, queue.keyring) as server:
        yield Place(queue, server.url)
    asyncio.run(queue.close())


def read(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_processes_share_the_work_and_none_is_left(place: Place, tmp_path: Path) -> None:
    with ProcessRunners(
        played.who, place.url, place.key, 2, logs=tmp_path, max_concurrency=1, timeouts=QUICK
    ) as runners:
        until(lambda: len(asyncio.run(place.queue.runners())) == 2)
        pids = runners.pids
        states = through(place.queue, wanted(20))
        runners.check()
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert {state.status for state in states} == {Status.SUCCEEDED}
    assert {state.last.total for state in states if state.last} == {float(pid) for pid in pids}
    assert all(gone(pid) for pid in pids)
    assert read(tmp_path / "runner-0.log") == []


def test_a_runner_that_is_killed_is_replaced_and_its_attempt_tried_again(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "etude.agents")
    pids = tmp_path / "pids"
    limits = RolloutLimits(timeout_s=20, unresponsive_s=0.6, max_attempts=1)
    with ProcessRunners(played.starts, place.url, place.key, logs=tmp_path, timeouts=QUICK) as runners:
        (id,) = asyncio.run(place.queue.enqueue(wanted(1, limits, {"pids": str(pids)})))
        until(lambda: len(read(pids)) == 2)
        child, runner = map(int, read(pids))
        os.kill(runner, signal.SIGKILL)
        assert gone(runner) and gone(child)
        until(lambda: place.queue.journal.rollout(id).status is Status.UNRESPONSIVE)
        until(lambda: runners.pids and runners.pids != [runner])
    assert "killed by SIGKILL" in caplog.text and "It restarts in 0.5 s" in caplog.text


def test_running_attempts_are_cancelled_when_the_time_is_over(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "log"
    pace = replace(QUICK, drain_s=0.3)
    with ProcessRunners(played.waits, place.url, place.key, logs=tmp_path, timeouts=pace) as runners:
        (id,) = asyncio.run(place.queue.enqueue(wanted(1, fields={"log": str(file)})))
        until(lambda: read(file))
        pids = runners.pids
    assert read(file) == ["began", "cancelled"] and all(gone(pid) for pid in pids)
    assert place.queue.journal.rollout(id).status is Status.QUEUED


def test_a_process_that_hangs_is_killed_in_the_end(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("etude.agents.execution.processes.MARGIN", 0.2)
    file = tmp_path / "log"
    pace = replace(QUICK, drain_s=0.2, cancel_s=0.1)
    with ProcessRunners(played.stops, place.url, place.key, logs=tmp_path, timeouts=pace) as runners:
        asyncio.run(place.queue.enqueue(wanted(1, fields={"log": str(file)})))
        until(lambda: read(file))
        (pid,) = runners.pids
        began = time.monotonic()
    assert time.monotonic() - began < 5 and gone(pid)
    assert "did not end after SIGTERM, and is killed" in caplog.text


def test_a_runner_that_cannot_start_is_given_up_with_the_reason(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.agents.execution.backoff.MAX_RESTARTS", 1)
    monkeypatch.setattr("etude.agents.execution.backoff.FIRST_DELAY", 0.01)
    with ProcessRunners(played.Broken(), place.url, place.key, logs=tmp_path, timeouts=QUICK) as runners:
        end = time.monotonic() + 20
        with pytest.raises(AgentError, match=r"Broken could not be set up: OSError: no index here.*not restarted"):
            while time.monotonic() < end:
                runners.check()
                time.sleep(0.05)


def test_a_supervisor_that_fails_is_reported_to_the_run(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.write_text("a file in the place of the directory")
    runners = ProcessRunners(played.who, "http://127.0.0.1:1", "a key", logs=logs, timeouts=QUICK)
    with pytest.raises(AgentError, match=r"supervisor of the runner processes failed: .*logs"), runners:
        until(lambda: runners.check())


def test_an_agent_that_no_process_can_load_is_tried_once(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def solve(task):\n    return 1.0\n")
    agent = load_agent(f"{file}:solve")
    file.write_text("raise RuntimeError('it is broken now')\n")
    failing = pytest.raises(AgentError, match=r"exit code 113.* it is broken now")
    with ProcessRunners(agent, place.url, place.key, 1, logs=tmp_path, timeouts=QUICK) as runners, failing as raised:
        until(lambda: runners.check())
    assert str(raised.value).count("it is broken now") == 1 and "It restarts" not in str(raised.value)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_program_that_is_killed_or_interrupted(
    place: Place, tmp_path: Path, how: signal.Signals
) -> None:
    program = subprocess.Popen(
        [sys.executable, played.__file__, place.url, place.key, str(tmp_path)],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        asyncio.run(place.queue.enqueue(wanted(4)))
        until(lambda: len(read(tmp_path / "pids")) == 8 and len(read(tmp_path / "runners")) == 2)
        program.send_signal(how)
        program.wait(15)
    finally:
        program.kill()
        program.wait()
    left = [int(pid) for pid in read(tmp_path / "pids") + read(tmp_path / "runners")]
    assert len(left) == 10 and all(gone(pid) for pid in left)


def test_an_agent_is_sent_with_its_constructor_arguments(place: Place, tmp_path: Path) -> None:
    with ProcessRunners(played.Made(0.5), place.url, place.key, logs=tmp_path, timeouts=QUICK):
        (state,) = through(place.queue, wanted(1))
    assert state.last is not None and state.last.total == 0.5


def test_an_agent_that_cannot_be_sent_is_refused_at_once(tmp_path: Path) -> None:
    class Inner(etude.Agent):
        def run(self, task: Task) -> None: ...

    with pytest.raises(AgentError, match="The agent Inner cannot be sent to other processes"):
        ProcessRunners(Inner(), "http://127.0.0.1:1", "key", logs=tmp_path)
    with pytest.raises(AgentError, match="0 runners"):
        ProcessRunners(played.who, "http://127.0.0.1:1", "key", 0, logs=tmp_path)


def test_a_program_with_the_key_reports_its_reward(place: Place, tmp_path: Path) -> None:
    code = "import etude; etude.emit.event('seen', 1); etude.emit.reward({'right': 1.0})"
    agent = etude.command([sys.executable, "-c", code], reward_key=True)
    with ProcessRunners(agent, place.url, place.key, logs=tmp_path, timeouts=QUICK):
        (state,) = through(place.queue, wanted(1))
    assert state.status is Status.SUCCEEDED and state.last is not None and state.last.total == 1.0
    assert asyncio.run(place.queue.notes(state.id))[0]["name"] == "seen"


def test_an_agent_of_the_started_file_is_sent_too(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        """
import asyncio, sys
from pathlib import Path
import etude
from etude.agents.agent import load_agent
from etude.agents.execution.processes import ProcessRunners
from etude.store.http.remote_queue import RemoteRolloutQueue
from tests.agents.rollout_queues import QUICK

class Mine(etude.Agent):
    def __init__(self): self.value = 0.25
    def run(self, task): return self.value

@etude.agent
def mine(task): return 0.75

if __name__ == "__main__":
    _, url, key, logs, which = sys.argv
    with ProcessRunners(Mine() if which == "class" else mine, url, key, logs=Path(logs), timeouts=QUICK) as runners:
        sys.stdin.read()
"""
    )
    for which, reward in (("class", 0.25), ("function", 0.75)):
        program = subprocess.Popen(
            [sys.executable, str(file), place.url, place.key, str(tmp_path), which],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        cursor = asyncio.run(place.queue.wait(0, 0.0))[0]
        task = wanted(2)[which == "function"]

        async def waited(cursor: int = cursor, task: object = task) -> float | None:
            await place.queue.enqueue([task])  # type: ignore[list-item]
            _, (state,) = await place.queue.wait(cursor, 20.0)
            return state.last.total if state.last else None

        assert asyncio.run(waited()) == reward
        program.communicate(b"", timeout=15)
        assert program.returncode == 0


def test_a_runner_joins_from_elsewhere_by_name_and_drains_when_it_is_terminated(place: Place, tmp_path: Path) -> None:
    code = (
        "from etude.agents.execution.runner_process import join_store; join_store('tests.agents.execution.played:slow')"
    )
    environment = {**os.environ, "ETUDE_STORE_URL": place.url, "ETUDE_STORE_KEY": place.key}
    file = tmp_path / "log"
    runner = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        (id,) = asyncio.run(place.queue.enqueue(wanted(1, fields={"log": str(file)})))
        until(lambda: read(file))
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(15) == 0
    finally:
        runner.kill()
        runner.wait()
    assert place.queue.journal.rollout(id).status is Status.SUCCEEDED


def test_a_runner_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETUDE_STORE_URL", raising=False)
    with pytest.raises(ConfigError, match=r"ETUDE_STORE_URL.* not set\."):
        join_store("tests.agents.execution.played:who", key="key")


def test_a_runner_claims_its_first_task_without_heavy_libraries(place: Place) -> None:
    """In a fresh interpreter: a runner that loads torch takes seconds to start, and a gigabyte."""
    asyncio.run(place.queue.enqueue(wanted(1)))
    code = f"""
import asyncio, sys
import etude
from etude.agents import Runner
from etude.store.http.remote_queue import RemoteRolloutQueue

loaded = []

@etude.agent
async def first(task):
    loaded.extend(sorted({{name.partition(".")[0] for name in sys.modules}}))
    runner.stop()

async def main():
    global runner
    queue = RemoteRolloutQueue({place.url!r}, {place.key!r})
    runner = Runner(queue, first, max_concurrency=1)
    await runner.run()
    await queue.close()

asyncio.run(main())
print(*loaded)
"""
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120).split()
    heavy = {"torch", "transformers", "pydantic", "sqlalchemy", "hydra", "omegaconf", "fastapi", "matplotlib"}
    assert "numpy" in loaded and not heavy & set(loaded)
