"""Slurm: the job script of a run, and the commands that submit, watch and cancel it.

A job ends in the run's own command, which resumes the run. So a job that Slurm queues again after a preemption, a
broken node or its time limit goes on where it was. Two minutes before the limit Slurm sends SIGTERM: the run finishes
its step and saves, and the job queues itself again.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from etude.clusters.options import JobConfig
from etude.errors import ConfigError, RunError

TIMEOUT_S = 60.0
"""Seconds of one command of Slurm."""
NOTICE_S = 120
"""Seconds between SIGTERM and the time limit."""
JobState = Literal["waiting", "running", "done", "failed", "cancelled", "unknown"]
STATES: dict[str, JobState] = {
    "PENDING": "waiting",
    "CONFIGURING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "SUSPENDED": "waiting",
    "RUNNING": "running",
    "COMPLETING": "running",
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "PREEMPTED": "failed",
    "TIMEOUT": "failed",
}
RUN = """\
@COMMAND@ &
run=$!
stopping=
trap 'stopping=yes; signalled=yes; kill -TERM "$run" 2>/dev/null' TERM
signalled=yes
while [ -n "$signalled" ]; do   # a signal ends `wait`, and not the run
  signalled=
  wait "$run"; code=$?
done
"""
"""Runs the command, and passes SIGTERM on to it."""
RAY = """\
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -v -tx1 /dev/urandom | tr -d ' \\n')
HEAD=$(hostname -i | cut -d' ' -f1)
PORT=$((20000 + SLURM_JOB_ID % 20000))
RAY_ADDRESS=$HEAD:$PORT
export RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_ADDRESS HEAD PORT
await_head() {
  for _ in $(seq 120); do
    if (exec 3<>"/dev/tcp/$HEAD/$PORT") 2>/dev/null; then return 0; fi
    sleep 1
  done
  echo "etude launch: no head of Ray answers at $RAY_ADDRESS after two minutes." >&2
  return 1
}
# shellcheck disable=SC2329  # the tasks call it
start_node() {   # the head in the first task, and the others once it listens
  if [ "$SLURM_PROCID" = 0 ]; then
    exec @RAY@ --head --node-ip-address="$HEAD" --port="$PORT" --include-dashboard=false
  fi
  await_head && exec @RAY@ --address="$RAY_ADDRESS"
}
export -f await_head start_node
srun --overlap --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 @RESOURCES@ bash -c start_node &
nodes=$!
await_head || { kill "$nodes"; exit 1; }
"""
"""Starts Ray on all machines, with a new token."""
END_RAY = """\
kill "$nodes" 2>/dev/null
wait "$nodes"
"""
END = """\
state=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z]*')
if [ -n "$stopping" ] && [ "$state" = JobState=RUNNING ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""
"""Queues the job again where it was stopped by its time limit. A job that was cancelled is not in that state."""


def write_script(job: JobConfig, command: Sequence[str], python: str, name: str, log: Path) -> str:
    """Return the job script that runs a command. log: with `%j` for the number of the job."""
    wanted = {
        "job-name": name,
        "output": log,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.cpus,
        "gpus-per-node": job.gpus or None,
        "mem": None if job.memory_gib is None else f"{job.memory_gib}G",
        "time": job.minutes,
        "partition": job.partition,
        "account": job.account,
        "signal": f"B:TERM@{NOTICE_S}",
        "open-mode": "append",
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{option}={value}" for option, value in wanted.items() if value is not None]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in job.more)]
    lines += [
        "# Written by `etude launch slurm`: do not edit it. The command below resumes its run.",
        "set -uo pipefail",
    ]
    lines += job.setup
    script = "\n".join(lines) + "\n"
    run = RUN.replace("@COMMAND@", shlex.join(command))
    if job.nodes == 1:
        return script + run + END
    cpus = f"--num-cpus={job.cpus}"
    ray = shlex.join([python, "-m", "ray.scripts.scripts", "start", cpus, "--disable-usage-stats", "--block"])
    resources = f"--cpus-per-task={job.cpus}" + (f" --gpus-per-node={job.gpus}" if job.gpus else "")
    started = RAY.replace("@RAY@", ray).replace("@RESOURCES@", resources)
    return script + started + run + END_RAY + END


def submit(script: Path) -> str:
    """Submit a job script, and return the job's number."""
    said = _call("sbatch", "--parsable", str(script))
    number = said.strip().partition(";")[0]
    if not number.isdecimal():
        raise RunError(f"`sbatch` printed no number of a job, but {said.strip()!r}.")
    return number


def read_state(number: str) -> JobState:
    """Return the state of a job; `unknown` for one that Slurm has forgotten, some minutes after its end."""
    done = _run("scontrol", "show", "job", "--oneliner", number)
    found = re.search(r"\bJobState=(\w+)", done.stdout)
    return STATES.get(found.group(1), "unknown") if done.returncode == 0 and found else "unknown"


def cancel(number: str) -> None:
    """Cancel a job: its run gets SIGTERM, and saves if that takes no longer than Slurm waits (`KillWait`)."""
    _call("scancel", number)


def _call(*words: str) -> str:
    """Return the output of a command of Slurm; raise with its error if it fails."""
    done = _run(*words)
    if done.returncode:
        raise RunError(f"`{words[0]}` refuses the job: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"`etude launch slurm` calls `{words[0]}`, which is not on this machine's PATH. Run it on a login node, or "
            "write the job script only: `--dry-run`."
        )
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"`{words[0]}` did not answer within {TIMEOUT_S:g} s. Is the controller of Slurm up?") from error
