"""Runners on threads: they share the work, restart when they end, and stop within their time limit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import etude
from etude.agents.execution.backoff import HEALTHY_AFTER, RestartBackoff
from etude.agents.execution.threads import ThreadRunners
from etude.agents.runner import RunnerTimeouts
from etude.errors import AgentError
from etude.records import Task
from etude.store import RolloutState, open_store
from etude.store.journal.states import Status
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutRequest
from tests.agents.rollout_queues import QUICK, ends, wanted
from tests.processes import gone


class Alone(etude.Agent):
    """An agent that returns the number of its instance."""

    lock, together = threading.Lock(), threading.Barrier(3)
    made = 0

    def setup(self) -> None:
        with self.lock:
            type(self).made += 1
            self.number = self.made

    def run(self, task: Task) -> int:
        self.together.wait(20)  # each of three instances has a task
        return self.number


@contextmanager
def open_queue(path: Path | None = None) -> Iterator[LocalRolloutQueue]:
    """A rollout queue that is closed at the end."""
    journal = open_store(path)
    local_queue = LocalRolloutQueue(journal)
    try:
        yield local_queue
    finally:
        asyncio.run(local_queue.close())
        journal.close()


def through(queue: LocalRolloutQueue, rollouts: list[RolloutRequest]) -> list[RolloutState]:
    """Return the results of these rollouts, read on a separate event loop, as a trainer does."""

    async def waited() -> list[RolloutState]:
        return await ends(queue, len(await queue.enqueue(rollouts)))

    return asyncio.run(waited())


def test_runners_on_threads_share_the_work_and_each_has_its_own_agent(tmp_path: Path) -> None:
    Alone.made = 0
    with (
        open_queue(tmp_path / "journal.db") as queue,
        ThreadRunners(queue, Alone(), 3, max_concurrency=1, timeouts=QUICK) as runners,
    ):
        states = through(queue, wanted(30))
        runners.check()
    assert {state.status for state in states} == {Status.SUCCEEDED}
    assert {state.last.total for state in states if state.last} == {1.0, 2.0, 3.0} and Alone.made == 3


def test_a_runner_that_ends_is_restarted_and_one_that_always_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("etude.agents.execution.backoff.FIRST_DELAY", 0.01)
    fails = [2]

    class Fickle(etude.Agent):
        def setup(self) -> None:
            if fails[0]:
                fails[0] -= 1
                raise OSError("not yet")

        def run(self, task: Task) -> float:
            return 1.0

    with open_queue() as queue, ThreadRunners(queue, Fickle(), timeouts=QUICK) as runners:
        assert through(queue, wanted(1))[0].status is Status.SUCCEEDED
        runners.check()
    assert caplog.text.count("restarts in") == 2

    fails[0] = 100
    with open_queue() as queue, ThreadRunners(queue, Fickle(), timeouts=QUICK) as runners:
        until = time.monotonic() + 10
        with pytest.raises(AgentError, match="could not be set up: OSError: not yet"):
            while time.monotonic() < until:
                runners.check()
                time.sleep(0.01)


def test_stopping_is_bounded_whatever_an_agent_does(caplog: pytest.LogCaptureFixture) -> None:
    begun, release = threading.Event(), threading.Event()

    @etude.agent
    def hangs(task: Task) -> None:
        begun.set()
        release.wait(30)

    with open_queue() as queue:
        with ThreadRunners(queue, hangs, 2, timeouts=replace(QUICK, drain_s=0.2, cancel_s=0.2)):
            (id,) = asyncio.run(queue.enqueue(wanted(1)))
            assert begun.wait(20)  # a claim alone does not say that the agent has begun
            began = time.monotonic()
        assert time.monotonic() - began < 20
        assert queue.journal.rollout(id).status is Status.QUEUED  # an infrastructure error: another runner may try it
    release.set()


def test_a_run_that_ends_by_an_error_waits_for_no_running_attempt(tmp_path: Path) -> None:
    """The run does not wait for the attempt, and the attempt's program is ended."""
    with open_queue() as queue:
        asyncio.run(queue.enqueue(wanted(1)))
        program = etude.command(f"echo $$ > {tmp_path}/pid; sleep 60")
        with pytest.raises(KeyboardInterrupt), ThreadRunners(queue, program, 1, timeouts=RunnerTimeouts(drain_s=60)):
            end = time.monotonic() + 20
            while not (tmp_path / "pid").exists() and time.monotonic() < end:
                time.sleep(0.02)
            began = time.monotonic()
            raise KeyboardInterrupt
        assert time.monotonic() - began < 15
        assert gone(int((tmp_path / "pid").read_text()))


def test_restarts_become_rarer_and_are_forgotten_after_a_healthy_time() -> None:
    again = RestartBackoff()
    waits = []
    for _ in range(6):
        again.started(0.0)
        waits.append(again.next_delay(1.0))
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, None]
    again.started(0.0)
    assert again.next_delay(HEALTHY_AFTER) == 0.5


def test_zero_runners_are_refused() -> None:
    with open_queue() as queue, pytest.raises(AgentError, match="0 runners"):
        ThreadRunners(queue, Alone(), 0)
