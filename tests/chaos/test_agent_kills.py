"""A run of agents whose trainer and whose runners are killed again and again trains as one that nobody killed."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from etude.recipes.run.directory import create_directory
from etude.store.keys import Keyring
from tests.chaos.agents import Act, Company, Played, some_acts
from tests.chaos.scenario import Life, make_world
from tests.processes import gone

pytestmark = pytest.mark.xdist_group("agent kills")  # which are held to one run that takes long


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
    """The run that nobody killed."""
    return company.perform(tmp_path_factory.mktemp("whole") / "run", world, [])


def same(found: Played, whole: Played) -> bool:
    """Whether the same tasks were asked, and trained on by the same steps."""
    return (found.rows, found.steps) == (whole.rows, whole.steps)


def test_a_killed_run_on_threads_trains_the_same_tasks(
    company: Company, world: Path, whole: Played, tmp_path: Path
) -> None:
    points = ["calling", "judging", "admitted", "published", "evaluated", "checkpoint.renaming"]
    acts = [Act(Life(point, 1 + place % 2)) for place, point in enumerate(points)]
    result = company.perform(tmp_path / "run", world, [*acts, *some_acts(2, 0, whole, falls=False)])
    assert result.kills >= len(points) and same(result, whole)
    assert result.attempts["infra_error"] > 0, "nothing was under way when it was killed"


def test_so_does_one_in_processes_whose_runners_are_killed_too(
    company: Company, world: Path, whole: Played, tmp_path: Path
) -> None:
    acts = [Act(Life("judging", 2), (0.0,)), Act(0.0), Act(Life("evaluated")), Act(falls=(0.0, 0.5))]
    result = company.perform(tmp_path / "run", world, acts, **{"agent.strategy": "cs"})
    assert result.kills == 3 and result.falls >= 2 and same(result, whole)


@pytest.mark.smoke
def test_one_kill_of_a_run_in_processes(company: Company, world: Path, whole: Played, tmp_path: Path) -> None:
    """The trainer is killed while it judges, and a runner as soon as an agent has its first answer."""
    acts = [Act(Life("judging", 2), (0.0,))]
    result = company.perform(tmp_path / "run", world, acts, **{"agent.strategy": "cs"})
    assert result.kills == 1 and same(result, whole)


@contextmanager
def joined(directory: Path, count: int) -> Iterator[tuple[str, list[int]]]:
    """Runners that join a run from elsewhere, and the address at which they look for it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    create_directory(directory)
    key = Keyring.load_or_create(directory).runner  # before the run is, since its runners come first
    code = (
        "from etude.agents.execution.runner_process import join_store; "
        f"join_store('tests.chaos.agents:asks_openai', 'http://{listen}', {key!r}, max_concurrency=4)"
    )
    with ExitStack() as stack:
        runners = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) for _ in range(count)]
        for runner in runners:
            stack.callback(runner.wait)
            stack.callback(runner.kill)
        yield listen, [runner.pid for runner in runners]
        for runner in runners:
            runner.terminate()
        assert all(gone(runner.pid, 20.0) for runner in runners), "a runner does not end when it is told to"


def test_runners_from_elsewhere_outlive_the_server_and_go_on(
    company: Company, world: Path, whole: Played, tmp_path: Path
) -> None:
    """With the trainer the store and the endpoint go, in the middle of calls of OpenAI's client; and one of three
    runners is killed."""
    with joined(tmp_path / "run", 3) as (listen, pids):
        acts = [Act(Life("judging", 2)), Act(Life("judging", 3), (0.0,)), Act(Life("admitted"))]
        changes = {"agent.runners": 0, "agent.listen": listen, "agent.path": "tests.chaos.agents:asks_openai"}
        result = company.perform(tmp_path / "run", world, acts, pids, **changes)
        assert result.kills == 3 and result.falls == 1 and same(result, whole)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["shm", "cs"])
def test_killed_thirty_times(company: Company, world: Path, whole: Played, tmp_path: Path, strategy: str) -> None:
    kills, story = 0, 0
    while kills < 30:
        acts = some_acts(16, story, whole, falls=strategy == "cs")
        result = company.perform(tmp_path / str(story), world, acts, **{"agent.strategy": strategy})
        assert same(result, whole)
        kills, story = kills + result.kills + result.falls, story + 1
