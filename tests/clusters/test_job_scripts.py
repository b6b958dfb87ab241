"""Job scripts, run by bash: what a cluster's signals do to a run, and Ray on several machines."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from etude.cli import main
from etude.clusters.options import JobConfig
from etude.clusters.slurm import write_script
from tests.components import require

Captured = pytest.CaptureFixture[str]
STAND_IN = """\
#!/bin/bash
# Stands in for a command of Slurm: tasks are processes of this machine.
case "$(basename "$0")" in
  scontrol) echo "$*" >>"$CALLS"; [ "$1" = show ] && echo "JobId=7 JobState=$STATE" ;;
  srun)
    while [ "$1" != bash ]; do shift; done
    for n in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_PROCID=$n "$@" & done
    trap 'kill $(jobs -p)' TERM
    wait; wait ;;
esac
"""
STOPS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(5)))
print("begun", flush=True)
time.sleep(60)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment like that of a job, with stand-ins for Slurm's commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scontrol", "srun"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(stat.S_IRWXU)
    job = {"SLURM_JOB_ID": "7", "STATE": "RUNNING", "CALLS": str(tmp_path / "calls")}
    return {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}"}


def script_of(tmp_path: Path, job: JobConfig, code: str) -> Path:
    path = tmp_path / "job.sh"
    path.write_text(write_script(job, [sys.executable, "-c", code], sys.executable, "mine", tmp_path / "log"))
    return path


@pytest.mark.parametrize(("state", "requeued"), [("RUNNING", True), ("CANCELLED", False)])
def test_a_job_that_is_stopped_saves_and_is_queued_again_unless_it_was_cancelled(
    state: str, requeued: bool, cluster: dict[str, str], tmp_path: Path
) -> None:
    script = script_of(tmp_path, JobConfig(setup=("echo prepared",)), STOPS)
    with subprocess.Popen(["bash", script], env={**cluster, "STATE": state}, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["prepared\n", "begun\n"]
        job.send_signal(signal.SIGTERM)
        assert job.stdout.read() == "saved\n"
    assert job.returncode == 5
    assert ("requeue 7" in (tmp_path / "calls").read_text()) is requeued


def test_a_job_ends_with_the_code_of_its_run(cluster: dict[str, str], tmp_path: Path) -> None:
    script = script_of(tmp_path, JobConfig(), "raise SystemExit(3)")
    assert subprocess.run(["bash", script], env=cluster).returncode == 3
    assert "requeue" not in (tmp_path / "calls").read_text()


def test_the_script_asks_for_what_the_options_say(tmp_path: Path) -> None:
    job = JobConfig(nodes=2, gpus=8, memory_gib=64, minutes=240, partition="gpu", account="me", more=("--qos=high",))
    script = write_script(job, ["etude", "train", "data.train=[a b.jsonl]"], "python", "mine", tmp_path / "job-%j.log")
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    wanted = "--nodes=2 --gpus-per-node=8 --mem=64G --time=240 --partition=gpu --account=me --requeue --qos=high"
    assert set(wanted.split()) <= set(asked)
    assert "etude train 'data.train=[a b.jsonl]' &" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_command_writes_a_job_that_runs_the_same_words(tmp_path: Path, capsys: Captured) -> None:
    """Without its own options, which a file may also hold; and with a file that only its owner reads."""
    options = tmp_path / "mine.yaml"
    options.write_text("model: {path: m}\nlaunch: {gpus: 1, minutes: 60}\n")
    run = tmp_path / "run"
    words = ["grpo", "reward=gsm8k", "data.train=[a.jsonl]", f"directory={run}"]
    assert main(["launch", "slurm", *words, "launch.cpus=2", "--config", str(options), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    copy = run / ".launch" / "options.yaml"
    given = f"train grpo reward=gsm8k 'data.train=[a.jsonl]' directory={run} --config {copy} &"
    assert given in shown and "--gpus-per-node=1" in shown and "--time=60" in shown and "--cpus-per-task=2" in shown
    assert copy.read_text() == "model:\n  path: m\n"
    script = run / ".launch" / "job.sh"
    assert script.read_text() == shown
    assert [stat.S_IMODE(path.stat().st_mode) for path in (script, copy)] == [0o600, 0o600]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "grpo", "model.path=m"], "give `directory=/shared/runs/mine`"),
        (["slurm", "sft", "directory=x", "launch.nodes=2"], "needs `cluster=ray`, and this run has `cluster=local`"),
        (["slurm", "sft", "grpo", "directory=x"], "The preset grpo belongs to `etude train`"),
        (["slurm", "grpo", "directory=x", "launch.minutes=1"], "launch.minutes"),
        (["slurm", "grpo", "directory=x", "launch.gpu=1"], "Did you mean launch.gpus?"),
        (["slurm", "grpo", "directory=x"], "`sbatch`, which is not on this machine's PATH"),
        (["state", "x"], "x has no job. Submit one"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


JOINS = """
import time
import ray
ray.init(log_to_driver=False)
end = time.monotonic() + 120
while sum(node["Alive"] for node in ray.nodes()) < 2 and time.monotonic() < end:
    time.sleep(0.2)
print("nodes", sum(node["Alive"] for node in ray.nodes()), flush=True)
"""


@pytest.mark.integration
def test_a_job_on_two_machines_joins_them_by_ray(cluster: dict[str, str], tmp_path: Path) -> None:
    """The Ray of the job has a token, and ends with the job."""
    require("ray")
    script = script_of(tmp_path, JobConfig(nodes=2, cpus=1), JOINS)
    number = str(os.getpid() + 10**6)  # the port of the head follows from it
    with TemporaryDirectory(prefix="ray-") as short:  # Ray's sockets are in it
        more = {"SLURM_JOB_ID": number, "SLURM_JOB_NUM_NODES": "2", "RAY_TMPDIR": short}
        done = subprocess.run(["bash", script], env={**cluster, **more}, capture_output=True, text=True, timeout=400)
    assert (done.returncode, "nodes 2" in done.stdout) == (0, True), done.stdout + done.stderr
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if started_with(path, f"SLURM_JOB_ID={number}")]
    assert not left


def started_with(path: Path, variable: str) -> bool:
    try:
        return variable.encode() in path.read_bytes().split(b"\0")
    except OSError:
        return False
