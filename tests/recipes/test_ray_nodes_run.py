"""Whole runs on a Ray that was started by others: on two nodes, of which one is lost, and as a job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from etude.cli import main
from tests.components import require
from tests.processes import descendants, gone
from tests.rays import GUARDED, RAY, a_head, actors, surroundings, two_nodes
from tests.recipes.runs import STEPS, is_straight, options, step_metrics
from tests.recipes.test_ray_run import PATIENT, started

pytestmark = pytest.mark.soak

ENDS = 120.0
"""Seconds within which a run ends after its node is lost, on a busy machine."""


@contextmanager
def halted(raylet: int) -> Iterator[None]:
    """Stop all that runs on a node, until the end."""
    processes = (raylet, *descendants(raylet))
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_lost_node_ends_the_run_with_a_sentence_and_the_run_can_be_resumed(
    stopped: bool, world: Path, paired: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It resumes with ranks on this machine, and ends with the weights of a run without an interruption, bit for
    bit."""
    run = tmp_path / "run"
    with (
        two_nodes() as two,
        started(world, run, STEPS, address=two.address, **{"crew.heartbeat_timeout": 15}) as process,
    ):
        ours, ranks, (lost,) = descendants(process.pid), two.ranks(), actors(two.raylets[1])
        assert len(ranks) == 2
        if not stopped:
            two.lose()
        with halted(two.raylets[1]) if stopped else nullcontext():
            assert process.wait(ENDS) == 2
            assert all(gone(pid, 30) for pid in (*ours, *ranks))
    message = capfd.readouterr().err
    how = "gave no sign of life" if stopped else "ended while it was"
    assert re.search(rf"Rank [01] of policy \(process {lost} on node [\d.]+\) {how} ", message), message
    assert "Start the run again" in message
    assert main(["train", *options(world, directory=run, ranks=2, steps=STEPS)]) == 0
    is_straight(run, paired)


PRAISE = """
from etude.records import Task

def digits(task: Task, answer: str) -> float:
    return sum(letter.isdigit() for letter in answer) / max(len(answer), 1)
"""


def test_a_run_can_be_submitted_as_a_ray_job(world: Path, tmp_path: Path) -> None:
    """It is submitted to a head on this machine, with its working directory, which has its reward."""
    require("ray-jobs")
    code, run = tmp_path / "code", tmp_path / "run"
    code.mkdir()
    (code / "praise.py").write_text(PRAISE)
    given = {"directory": run, "ranks": 2, "cluster": "ray", "steps": 1, "reward.path": "praise:digits", **PATIENT}
    with a_head(dashboard=True) as head:
        words = [*RAY, "job", "submit", "--address", head.dashboard, "--working-dir", str(code), "--"]
        words += [sys.executable, "-m", "etude", "train", *options(world, **given)]
        done = subprocess.run(words, env=surroundings(**GUARDED), capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [step["step"] for step in step_metrics(run)] == [1]
    assert sorted(path.name for path in (run / "ranks").iterdir()) == ["rank-0.log", "rank-1.log"]
