"""Whole runs whose ranks are Ray actors: their training, their files, and their ends."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from etude.cli import main
from etude.observe import configure_logging
from etude.recipes.run.rules import checks
from tests.processes import descendants, gone
from tests.rays import actors, joining, surroundings
from tests.recipes.players import TALKS
from tests.recipes.run.test_loop import EVERY_STEP
from tests.recipes.runs import STEPS, Captured, is_straight, options, refused, run_of, step_metrics, train
from tests.recipes.test_interrupt import CODE
from tests.recipes.test_ranks_run import drawn, furthest

PATIENT = {"crew.heartbeat_timeout": 120, "crew.timeout": 600}
AGENTS = 180.0
"""Seconds within which Ray's own agents notice that Ray has gone: they wait a minute for another."""


@pytest.mark.usefixtures("a_ray")
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    "mesh",
    [pytest.param({"ranks": 2}, marks=pytest.mark.smoke), {"ranks": 4, "mesh__tensor": 2}],
    ids=["data", "tensor"],
)
def test_a_run_over_ray_learns_the_same_as_one_without_ray(
    mesh: dict[str, int], splittable: Path, tmp_path: Path
) -> None:
    """It samples exactly the same answers, measures the same, and resumes without Ray."""
    whole = train(splittable, tmp_path / "whole", steps=4)
    run = train(splittable, tmp_path / "run", cluster="ray", **PATIENT, **mesh)
    steps = step_metrics(run)
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        wanted = {name for name in EVERY_STEP if not name.startswith("reward/")}
        assert step.keys() >= wanted, wanted - step.keys()
        assert all(math.isfinite(step[name]) for name in wanted)
        assert step["rollouts"] == 12 and step["mismatch/largest_gap"] < 1e-5
    assert [(ids, logp) for ids, logp, _ in drawn(run, 1)] == [(ids, logp) for ids, logp, _ in drawn(whole, 1)]
    logs = [f"rank-{rank}.log" for rank in range(mesh["ranks"])]
    assert sorted(path.name for path in (run / "ranks").iterdir()) == logs
    assert main(["train", "--resume", str(run), "ranks=1", "mesh.tensor=1", "cluster=local", "steps=4"]) == 0
    assert 0 < furthest(run, whole) < 1e-3


def test_agents_are_not_trained_over_ray_yet(world: Path, tmp_path: Path, capsys: Captured) -> None:
    given = {"directory": tmp_path / "run", "cluster": "ray", **TALKS}
    message = refused(capsys, "train", *options(world, **given))
    assert "`cluster=ray` puts the engine into another process" in message and not (tmp_path / "run").exists()


def test_cores_of_this_machine_do_not_limit_a_cluster(world: Path, capsys: Captured) -> None:
    configure_logging("info")
    crowded = {"ranks": 4, "threads": os.cpu_count() or 1, "collect.tasks": 8}
    checks.check_run(run_of(world, **crowded))
    assert "they will slow each other down" in capsys.readouterr().err
    checks.check_run(run_of(world, **crowded, cluster="ray"))
    checks.check_run(run_of(world, cluster="ray", **{"crew.heartbeat_timeout": 5}))
    assert capsys.readouterr().err == ""


# -- a Ray of the run's own -------------------------------------------------------------------------------------------


@contextmanager
def started(
    world: Path, run: Path, steps: int, *, address: str = "", **changes: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run in another process and wait until it has measured a step; on the Ray of an address, or on its own."""
    given = {"directory": run, "ranks": 2, "cluster": "ray", "steps": steps, "checkpoint.every": 1, **PATIENT}
    words = ["train", *options(world, **given | changes)]
    where = surroundings(**joining(address) if address else {})
    process = subprocess.Popen([sys.executable, "-c", CODE, *words], env=where)
    try:
        until = time.monotonic() + 600
        while not ((run / "metrics.jsonl").is_file() and step_metrics(run)):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.soak
@pytest.mark.parametrize("stopped", [False, True], ids=["working", "stopped"])
def test_a_killed_controller_leaves_no_process_of_ray_and_its_run_can_be_resumed(
    stopped: bool, world: Path, paired: Path, tmp_path: Path
) -> None:
    """Not even a rank that is stopped and cannot notice is left. Collected rollouts are not collected again."""
    run = tmp_path / "run"
    with started(world, run, STEPS) as process:
        ours = descendants(process.pid)
        ranks = actors(process.pid)
        assert len(ranks) == 2
        if stopped:
            os.kill(ranks[0], signal.SIGSTOP)
        process.kill()
        process.wait()
        assert all(gone(pid, 30) for pid in ranks)
        assert all(gone(pid, AGENTS) for pid in ours)
    assert main(["train", *options(world, directory=run, ranks=2, steps=STEPS, cluster="ray", **PATIENT)]) == 0
    is_straight(run, paired)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_run_with_a_sentence_and_the_run_can_be_resumed(
    number: signal.Signals, world: Path, paired: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It resumes to the weights of a run without an interruption, bit for bit."""
    run = tmp_path / "run"
    with started(world, run, STEPS, **{"crew.heartbeat_timeout": 10}) as process:
        ours, ranks = descendants(process.pid), actors(process.pid)
        os.kill(ranks[-1], number)
        assert process.wait(120) == 2
        assert all(gone(pid, 30) for pid in ours)
    message = capfd.readouterr().err
    assert f"of policy (process {ranks[-1]} on node " in message and "Start the run again" in message
    assert ("its process is gone" if number is signal.SIGKILL else "gave no sign of life") in message
    assert main(["train", *options(world, directory=run, ranks=2, steps=STEPS)]) == 0
    is_straight(run, paired)


@pytest.mark.soak
def test_a_stopped_controller_continues_where_it_was(world: Path, paired: Path, tmp_path: Path) -> None:
    """It is stopped for longer than ranks may be silent. The ranks are not silent, but the controller does not hear
    them."""
    run = tmp_path / "run"
    with started(world, run, STEPS, **{"crew.heartbeat_timeout": 10}) as process:
        process.send_signal(signal.SIGSTOP)
        done = len(step_metrics(run))
        time.sleep(20)
        assert len(step_metrics(run)) == done < STEPS
        process.send_signal(signal.SIGCONT)
        assert process.wait(300) == 0
    is_straight(run, paired)


@pytest.mark.soak
def test_ctrl_c_ends_the_step_and_ray(world: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with started(world, run, 400) as process:
        ours = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        assert all(gone(pid, 30) for pid in ours)
    message = capfd.readouterr().err
    assert "Stopping after this step" in message and "Stopped after step" in message
    assert main(["train", "--resume", str(run), "cluster=local", f"steps={len(step_metrics(run)) + 1}"]) == 0


@pytest.mark.soak
def test_sigterm_ends_the_step_and_ray(world: Path, tmp_path: Path) -> None:
    """Ray handles that signal itself, and has to restore the run's handler."""
    with started(world, tmp_path / "run", 400) as process:
        process.terminate()
        assert process.wait(120) == 130
