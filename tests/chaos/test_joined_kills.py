"""A run whose rollouts are kept by a store elsewhere, and whose trainer and store are killed, trains as one that nobody
killed: each task by its step, with the weights of that step, and nothing lost."""

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
from etude.store.keys import RUNNER_KEY
from etude.store.queue_state import INTERRUPTED
from tests.chaos.agents import LONG, Act, Company, Played, options_of, recorded_answers
from tests.chaos.scenario import Life, make_world
from tests.chaos.test_agent_kills import same
from tests.joined import Process, started
from tests.processes import gone

KEY = "the-admin-key-of-a-store-in-tests"


@pytest.fixture(scope="module")
def company() -> Company:
    """Where lives are started."""
    return Company()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that every life begins from."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def whole(company: Company, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The run that nobody killed, and that kept its rollouts itself."""
    return company.perform(tmp_path_factory.mktemp("whole") / "run", world, [])


class Kept:
    """A store, two runners that have joined it, and what a run is told to join it too."""

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
            "agent.listen": f"127.0.0.1:{port}",  # where a life is found by whoever plays what an earlier one asked for
            "agent.path": "tests.chaos.agents:asks_openai",
            "environment": {"ETUDE_STORE_KEY": KEY},
        }

    def serve(self) -> None:
        """Have it served."""
        self.store: Process = self._stack.enter_context(
            started(self._words, self._place / "store.log", ETUDE_STORE_KEY=KEY)
        )
        self.store.says("A trainer:")

    def falls(self) -> None:
        """Kill it, and serve it again after a while."""
        self.store.send_signal(signal.SIGKILL)
        self.store.ends()
        self.store.log.unlink()
        time.sleep(1.0)
        self.serve()

    @property
    def pids(self) -> list[int]:
        """The processes of its runners."""
        return [runner.pid for runner in self.runners]


@contextmanager
def kept(place: Path) -> Iterator[Kept]:
    """A store with runners, gone in the end."""
    with ExitStack() as stack:
        made = Kept(place, stack)
        yield made
        for runner in made.runners:
            runner.terminate()
        assert all(gone(pid, 20.0) for pid in made.pids), "a runner does not end when it is told to"


def nothing_lost(run: Path, store: Path) -> None:
    """Every rollout succeeded, at the store as in the journal of the run, by the same attempts; those of earlier lives
    were cut off and are nobody's failure."""
    with closing(open_store(run / "journal.sqlite")) as mine, closing(open_store(store / "journal.sqlite")) as theirs:
        here, there = mine.rollouts(), theirs.rollouts()
        assert {state.status for state in here} == {Status.SUCCEEDED}
        known = {state.id: state for state in there}
        assert known.keys() == {state.id for state in here}
        for state in here:
            attempts = [(each.status, each.turns, each.runner) for each in known[state.id].attempts]
            assert [(each.status, each.turns, each.runner) for each in state.attempts] == attempts
            assert [turn.completion.text for turn in mine.turns(state.id)] == [
                turn.completion.text for turn in theirs.turns(state.id)
            ]


def cut_off(run: Path) -> int:
    """How many attempts were."""
    with closing(open_store(run / "journal.sqlite")) as journal:
        states = list(journal.iter_states(RolloutState))
    return sum(attempt.error == INTERRUPTED for state in states for attempt in state.attempts)


def test_a_joined_trainer_that_is_killed_trains_with_the_weights_of_each_step(
    company: Company, world: Path, whole: Played, tmp_path: Path
) -> None:
    """It is killed in the middle of the third step, and there again, and the store once before, while runners and
    their agents go on."""
    with kept(tmp_path) as there:
        acts = [Act(Life("judging", 10)), Act(0.0), Act(Life("published", 2))]
        falling = threading.Thread(target=_once_begun, args=(tmp_path / "run", there))
        falling.start()
        result = company.perform(tmp_path / "run", world, acts, there.pids, **there.options)
        falling.join()
    assert result.kills == len(acts) and same(result, whole)
    assert cut_off(tmp_path / "run") > 0, "nothing was under way when it was killed"
    nothing_lost(tmp_path / "run", tmp_path / "store")


def _once_begun(run: Path, there: Kept) -> None:
    """Have the store fall amid the run's first answers."""
    until = time.monotonic() + 60
    while len(recorded_answers(run)) < 12 and time.monotonic() < until:
        time.sleep(0.05)
    there.falls()


@pytest.mark.soak
def test_a_trainer_that_is_away_for_long_loses_nothing(
    company: Company, world: Path, whole: Played, tmp_path: Path
) -> None:
    """Longer than the store believes that it is there, with runners that would play all that they are lent."""
    with kept(tmp_path) as there:
        options = options_of(tmp_path / "run", world, LONG, **there.options)
        for _ in range(2):
            assert not company.live(tmp_path / "run", world, Life("judging", 2), **options)
            time.sleep(LEASE_S + 10)
        result = company.perform(tmp_path / "run", world, [], there.pids, **there.options)
    assert same(result, whole)
    nothing_lost(tmp_path / "run", tmp_path / "store")
    with closing(open_store(tmp_path / "run" / "journal.sqlite")) as journal:
        broken = [
            sum(each.status is Status.INFRA_ERROR and each.error != INTERRUPTED for each in state.attempts)
            for state in journal.rollouts()
        ]
    assert max(broken) <= 4, "it was tried again and again while nobody was there"
