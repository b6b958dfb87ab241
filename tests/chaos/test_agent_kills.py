"""A run of agents whose trainer and runners are killed again and again trains like an uninterrupted one."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from etude.recipes.run.directory import create_directory
from etude.store.queue.keys import Keyring
from tests.chaos.agents import AgentRunKiller, AgentRunResult, KillPlan, random_plans
from tests.chaos.scenario import KillPoint, make_world
from tests.processes import gone

pytestmark = pytest.mark.xdist_group("agent kills")  # compared with one run that takes long


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
    """The run without a kill."""
    return killer.run_agents(tmp_path_factory.mktemp("whole") / "run", world, [])


def same_training(result: AgentRunResult, uninterrupted: AgentRunResult) -> bool:
    """Return whether the same tasks were issued, and trained on by the same steps."""
    return (result.rows, result.steps) == (uninterrupted.rows, uninterrupted.steps)


def test_a_killed_run_on_threads_trains_the_same_tasks(
    killer: AgentRunKiller, world: Path, uninterrupted: AgentRunResult, tmp_path: Path
) -> None:
    points = ["calling", "judging", "admitted", "published", "evaluated", "checkpoint.renaming"]
    plans = [KillPlan(KillPoint(point, 1 + place % 2)) for place, point in enumerate(points)]
    result = killer.run_agents(
        tmp_path / "run", world, [*plans, *random_plans(2, 0, uninterrupted, kill_runners=False)]
    )
    assert result.kills >= len(points) and same_training(result, uninterrupted)
    assert result.attempts["infra_error"] > 0, "nothing was under way when it was killed"


def test_a_killed_run_in_processes_whose_runners_are_killed_trains_the_same_tasks(
    killer: AgentRunKiller, world: Path, uninterrupted: AgentRunResult, tmp_path: Path
) -> None:
    plans = [
        KillPlan(KillPoint("judging", 2), (0.0,)),
        KillPlan(0.0),
        KillPlan(KillPoint("evaluated")),
        KillPlan(runner_kills=(0.0, 0.5)),
    ]
    result = killer.run_agents(tmp_path / "run", world, plans, (), **{"agent.strategy": "cs"})
    assert result.kills == 3 and result.runner_kills >= 2 and same_training(result, uninterrupted)


@pytest.mark.smoke
def test_one_kill_of_a_run_in_processes(
    killer: AgentRunKiller, world: Path, uninterrupted: AgentRunResult, tmp_path: Path
) -> None:
    """The trainer is killed while it judges, and a runner as soon as an agent has its first answer."""
    plans = [KillPlan(KillPoint("judging", 2), (0.0,))]
    result = killer.run_agents(tmp_path / "run", world, plans, (), **{"agent.strategy": "cs"})
    assert result.kills == 1 and same_training(result, uninterrupted)


@contextmanager
def joined(directory: Path, count: int) -> Iterator[tuple[str, list[int]]]:
    """Start runners that join a run from outside; yield the address that they use, and their process ids."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    create_directory(directory)
    key = Keyring.load_or_create(directory).runner  # before the run exists, since its runners start first
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
        assert all(gone(runner.pid, 20.0) for runner in runners), "a runner does not end after SIGTERM"


def test_external_runners_outlive_the_server_and_continue(
    killer: AgentRunKiller, world: Path, uninterrupted: AgentRunResult, tmp_path: Path
) -> None:
    """The trainer is killed with its store and endpoint during calls of OpenAI's client, and one of three runners
    too."""
    with joined(tmp_path / "run", 3) as (listen, pids):
        plans = [
            KillPlan(KillPoint("judging", 2)),
            KillPlan(KillPoint("judging", 3), (0.0,)),
            KillPlan(KillPoint("admitted")),
        ]
        changes = {"agent.runners": 0, "agent.listen": listen, "agent.path": "tests.chaos.agents:asks_openai"}
        result = killer.run_agents(tmp_path / "run", world, plans, pids, **changes)
        assert result.kills == 3 and result.runner_kills == 1 and same_training(result, uninterrupted)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["shm", "cs"])
def test_killed_thirty_times(
    killer: AgentRunKiller, world: Path, uninterrupted: AgentRunResult, tmp_path: Path, strategy: str
) -> None:
    kills, number = 0, 0
    while kills < 30:
        plans = random_plans(16, number, uninterrupted, kill_runners=strategy == "cs")
        result = killer.run_agents(tmp_path / str(number), world, plans, (), **{"agent.strategy": strategy})
        assert same_training(result, uninterrupted)
        kills, number = kills + result.kills + result.runner_kills, number + 1
