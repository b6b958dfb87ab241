"""Agents that do not end, or start hidden processes. Their runners end all the same, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import etude
from etude.agents.execution.processes import ProcessRunners
from etude.agents.execution.threads import ThreadRunners
from etude.records import Outcome, Task
from etude.store import open_store
from etude.store.http.server import serve
from etude.store.journal.states import Status
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutLimits
from tests.agents.execution import played
from tests.agents.execution.test_processes import Place, read
from tests.agents.execution.test_threads import open_queue, through
from tests.agents.rollout_queues import QUICK, wanted
from tests.processes import gone
from tests.waits import blocked_until as until


@pytest.fixture
def place() -> Iterator[Place]:
    made = LocalRolloutQueue(open_store())
    with serve(made, made.keyring) as server:
        yield Place(made, server.url)
    asyncio.run(made.close())


def test_a_process_forked_by_an_agent_ends_with_a_killed_program(place: Place, tmp_path: Path) -> None:
    """A forked child inherits everything that its runner holds, including the runner's end of the reaper's pipe."""
    program = subprocess.Popen(
        [sys.executable, played.__file__, place.url, place.key, str(tmp_path), "forks"], start_new_session=True
    )
    pids = tmp_path / "pids"
    try:
        asyncio.run(place.queue.enqueue(wanted(2, fields={"pids": str(pids)})))
        until(lambda: len(read(pids)) == 4)
        program.kill()
        program.wait(15)
    finally:
        program.kill()
        program.wait()
    assert all(gone(int(pid)) for pid in read(pids))


def test_a_runner_that_hangs_loses_its_work_and_its_late_report_changes_nothing(place: Place, tmp_path: Path) -> None:
    """The runner is stopped with SIGSTOP and falls silent. After SIGCONT it learns that its attempt is over."""
    file = tmp_path / "log"
    limits = RolloutLimits(timeout_s=30, unresponsive_s=1.0, max_attempts=2)
    with ProcessRunners(
        played.slow, place.url, place.key, 2, logs=tmp_path, timeouts=QUICK, max_concurrency=1
    ) as runners:
        until(lambda: len(asyncio.run(place.queue.runners())) == 2)
        (id,) = asyncio.run(place.queue.enqueue(wanted(1, limits, {"log": str(file)})))
        until(lambda: read(file))
        name = place.queue.journal.rollout(id).attempts[0].runner
        hung = next(runner.info["pid"] for runner in asyncio.run(place.queue.runners()) if runner.name == name)
        os.kill(hung, signal.SIGSTOP)
        try:
            until(lambda: place.queue.journal.rollout(id).status is Status.SUCCEEDED)
        finally:
            os.kill(hung, signal.SIGCONT)
        until(lambda: place.queue.journal.rollout(id).attempts[0].late)
        assert hung in runners.pids
    state = place.queue.journal.rollout(id)
    assert [attempt.status for attempt in state.attempts] == [Status.UNRESPONSIVE, Status.SUCCEEDED]
    assert state.attempts[1].runner != name and state.last is not None and state.last.total == 1.0


def test_the_time_in_which_the_queue_is_stopped_does_not_count_against_an_attempt(tmp_path: Path) -> None:
    """The process of the queue is stopped alone, as by Ctrl-Z: its runner has a session of its own and runs on."""
    code = f"from tests.agents.execution import played; played.serve_one_rollout(played.Path({str(tmp_path)!r}), 2.5)"
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    try:
        until(lambda: read(tmp_path / "log"))
        program.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        program.send_signal(signal.SIGCONT)
        (tmp_path / "file").write_text("")
        assert program.stdout.read().split() == ["succeeded"]
        assert program.wait(15) == 0
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


@pytest.mark.parametrize("agent", ["stubborn", "hangs_in_a_thread"])
def test_a_runner_from_elsewhere_ends_whatever_its_agent_does(place: Place, tmp_path: Path, agent: str) -> None:
    """After two signals, as after Ctrl-C twice, neither a coroutine that ignores its cancellation nor a hanging thread
    keeps the process alive."""
    code = (
        "from etude.agents.execution.runner_process import join_store; from tests.agents.rollout_queues import QUICK; "
        f"join_store('tests.agents.execution.played:{agent}', {place.url!r}, {place.key!r}, timeouts=QUICK)"
    )
    file = tmp_path / "log"
    runner = subprocess.Popen([sys.executable, "-c", code])
    try:
        (id,) = asyncio.run(place.queue.enqueue(wanted(1, fields={"log": str(file)})))
        until(lambda: read(file))
        runner.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(15) == 0
    finally:
        runner.kill()
        runner.wait()
    state = place.queue.journal.rollout(id)
    assert state.status is Status.QUEUED and state.attempts[0].status.value == Outcome.INFRA_ERROR.value


def test_a_runner_on_a_thread_that_gives_up_is_replaced_though_its_agents_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("etude.agents.runner.MAX_ABANDONED", 1)
    monkeypatch.setattr("etude.agents.execution.backoff.FIRST_DELAY", 0.01)
    release = threading.Event()

    @etude.agent(timeout_s=0.2)
    async def stubborn(task: Task) -> float:
        while task["n"] == 0 and not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return 1.0

    pace = replace(QUICK, cancel_s=0.1)
    with open_queue() as queue, ThreadRunners(queue, stubborn, timeouts=pace, max_concurrency=1) as runners:
        states = through(queue, wanted(2))
        runners.check()
    release.set()
    assert [state.status for state in states] == [Status.TIMED_OUT, Status.SUCCEEDED]


def test_a_thread_of_asyncio_that_hangs_keeps_no_program_from_ending(tmp_path: Path) -> None:
    """Python waits at exit for the threads of `asyncio.to_thread`, unless the loop has another executor."""
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, time\nimport etude\nfrom etude.agents.runner import RunnerTimeouts\n"
        "from etude.agents.execution.threads import ThreadRunners\nfrom etude.records import Task\n"
        "from etude.store import open_store\nfrom etude.store.queue.local_queue import LocalRolloutQueue\n"
        "from etude.store.queue.rollout_queue import RolloutLimits, RolloutRequest\n"
        "@etude.agent\nasync def hangs(task):\n    await asyncio.to_thread(time.sleep, 60)\n"
        "async def story():\n"
        "    queue = LocalRolloutQueue(open_store())\n"
        "    await queue.enqueue([RolloutRequest(Task(0, {}), limits=RolloutLimits(timeout_s=0.3, max_attempts=1))])\n"
        "    with ThreadRunners(queue, hangs, 1, timeouts=RunnerTimeouts(drain_s=0.2, cancel_s=0.2)):\n"
        "        print((await queue.wait(0, 20.0))[1][0].status)\n"
        "    await queue.close()\n"
        "asyncio.run(story())\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=40)
    assert done.stdout.strip() == "timed_out" and done.returncode == 0, done.stderr
