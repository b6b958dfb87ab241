"""A run whose rollouts are kept by another store, with a killed trainer and a killed store, trains like an
uninterrupted one: each task by its step, with the weights of that step, and nothing is lost."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from etude.recipes.agents.remote_store import LEASE_S
from etude.store import RolloutState, Status, open_store
from etude.store.queue.attempt_ends import INTERRUPTED
from etude.store.queue.keys import RUNNER_KEY
from tests.chaos.agents import LONG, AgentRunKiller, AgentRunResult, KillPlan, options_of, recorded_answers
from tests.chaos.scenario import KillPoint, make_world
from tests.chaos.test_agent_kills import same_training
from tests.joined import Process, started
from tests.processes import gone

KEY = "the-admin-key-of-a-store-in-tests"


@pytest.fixture(scope="module")
def killer() -> AgentRunKiller:
    """The object that starts and kills processes."""
    return AgentRunKiller()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the tasks that every process starts from."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def uninterrupted(killer: AgentRunKiller, world: Path, tmp_path_factory: pytest.TempPathFactory) -> AgentRunResult:
    """The run without a kill, whose rollouts are in its own store."""
    return killer.run_agents(tmp_path_factory.mktemp("whole") / "run", world, [])


class JoinedStore:
    """A store, two runners that have joined it, and the options by which a run joins it too."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            listen = f"127.0.0.1:{free.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._place, self._stack = place, stack
        self._words = ["store", str(place / "store"), "--listen", listen]
        self.serve()
        url, key = f"http://{listen}", (place / "store" / RUNNER_KEY).read_text()
        code = (
            "from etude.agents.execution.runner_process import join_store; "
            f"join_store('tests.chaos.agents:asks_openai', '{url}', '{key}', max_concurrency=4)"
        )
        self.runners = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) for _ in range(2)]
        for runner in self.runners:
            stack.callback(runner.wait)
            stack.callback(runner.kill)
        self.options: dict[str, Any] = {
            "agent.runners": 0,
            "agent.store": url,
            "agent.listen": f"127.0.0.1:{port}",  # every process of the run has the endpoint at the same address
            "agent.path": "tests.chaos.agents:asks_openai",
            "environment": {"ETUDE_STORE_KEY": KEY},
        }

    def serve(self) -> None:
        """Start the store."""
        self.store: Process = self._stack.enter_context(
            started(self._words, self._place / "store.log", ETUDE_STORE_KEY=KEY)
        )
        self.store.says("A trainer:")

    def restart(self) -> None:
        """Kill the store, and start it again after a while."""
        self.store.send_signal(signal.SIGKILL)
        self.store.ends()
        self.store.log.unlink()
        time.sleep(1.0)
        self.serve()

    @property
    def pids(self) -> list[int]:
        """The processes of the runners."""
        return [runner.pid for runner in self.runners]


@contextmanager
def joined_store(place: Path) -> Iterator[JoinedStore]:
    """Start a store with runners, until the end."""
    with ExitStack() as stack:
        made = JoinedStore(place, stack)
        yield made
        for runner in made.runners:
            runner.terminate()
        assert all(gone(pid, 20.0) for pid in made.pids), "a runner does not end after SIGTERM"


def assert_nothing_lost(run: Path, store: Path) -> None:
    """Every rollout succeeded by the same attempts in the store and in the run's journal. Attempts of earlier processes
    were interrupted and count as no failure."""
    with (
        closing(open_store(run / "journal.sqlite")) as trainer_journal,
        closing(open_store(store / "journal.sqlite")) as store_journal,
    ):
        trained, stored = trainer_journal.rollouts(), store_journal.rollouts()
        assert {state.status for state in trained} == {Status.SUCCEEDED}
        known = {state.id: state for state in stored}
        assert known.keys() == {state.id for state in trained}
        for state in trained:
            attempts = [(attempt.status, attempt.turns, attempt.runner) for attempt in known[state.id].attempts]
            assert [(attempt.status, attempt.turns, attempt.runner) for attempt in state.attempts] == attempts
            assert [turn.completion.text for turn in trainer_journal.turns(state.id)] == [
                turn.completion.text for turn in store_journal.turns(state.id)
            ]


def count_interrupted(run: Path) -> int:
    """Return the number of interrupted attempts."""
    with closing(open_store(run / "journal.sqlite")) as journal:
        states = list(journal.iter_states(RolloutState))
    return sum(attempt.error == INTERRUPTED for state in states for attempt in state.attempts)


def test_a_joined_trainer_that_is_killed_trains_with_the_weights_of_each_step(
    killer: AgentRunKiller, world: Path, uninterrupted: AgentRunResult, tmp_path: Path
) -> None:
    """The trainer is killed in the middle of the third step, and there again, and the store once before. Runners and
    their agents go on."""
    with joined_store(tmp_path) as store:
        plans = [KillPlan(KillPoint("judging", 10)), KillPlan(0.0), KillPlan(KillPoint("published", 2))]
        restarting = threading.Thread(target=_restart_store, args=(tmp_path / "run", store))
        restarting.start()
        result = killer.run_agents(tmp_path / "run", world, plans, store.pids, **store.options)
        restarting.join()
    assert result.kills == len(plans) and same_training(result, uninterrupted)
    assert count_interrupted(tmp_path / "run") > 0, "nothing was under way when it was killed"
    assert_nothing_lost(tmp_path / "run", tmp_path / "store")


def _restart_store(run: Path, store: JoinedStore) -> None:
    """Restart the store during the run's first answers."""
    until = time.monotonic() + 60
    while len(recorded_answers(run)) < 12 and time.monotonic() < until:
        time.sleep(0.05)
    store.restart()


@pytest.mark.soak
def test_a_trainer_that_is_away_for_long_loses_nothing(
    killer: AgentRunKiller, world: Path, uninterrupted: AgentRunResult, tmp_path: Path
) -> None:
    """The trainer is away for longer than its lease, with runners that would play all that they can claim."""
    with joined_store(tmp_path) as store:
        options = options_of(tmp_path / "run", world, LONG, **store.options)
        for _ in range(2):
            assert not killer.run_once(tmp_path / "run", world, KillPoint("judging", 2), **options)
            time.sleep(LEASE_S + 10)
        result = killer.run_agents(tmp_path / "run", world, [], store.pids, **store.options)
    assert same_training(result, uninterrupted)
    assert_nothing_lost(tmp_path / "run", tmp_path / "store")
    with closing(open_store(tmp_path / "run" / "journal.sqlite")) as journal:
        broken = [
            sum(attempt.status is Status.INFRA_ERROR and attempt.error != INTERRUPTED for attempt in state.attempts)
            for state in journal.rollouts()
        ]
    assert max(broken) <= 4, "it was retried again and again while the trainer was away"
