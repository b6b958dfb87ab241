"""`etude launch`: submit a run as a job, and watch or cancel it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from etude.clusters import slurm
from etude.clusters.options import JobConfig
from etude.errors import ConfigError, RunError
from etude.integrity import read_json, write_json
from etude.recipes.recipe import Recipe

FOLDER = ".launch"
"""The folder of the job's files, in the directory of the run."""
POLL_S = 2.0


@dataclass(frozen=True)
class Launched:
    """A submitted job."""

    number: str
    directory: Path

    @property
    def log(self) -> Path:
        """The file of what the job prints."""
        return self.directory / FOLDER / f"job-{self.number}.log"


def check_job(run: Recipe, job: JobConfig) -> Path:
    """Return the directory of a run that a job can compute; refuse others."""
    if run.directory is None:
        raise ConfigError(
            "A launched run needs a directory that its machines share, so that a job that is queued again resumes it: "
            "give `directory=/shared/runs/mine`."
        )
    if job.nodes > 1 and run.cluster != "ray":
        raise ConfigError(
            f"`launch.nodes={job.nodes}` needs `cluster=ray`, and this run has `cluster={run.cluster}`. Set it, or "
            "leave `launch.nodes` out."
        )
    return run.directory.absolute()


def write_job(directory: Path, words: Sequence[str], file: Path | None, job: JobConfig) -> Path:
    """Write the job of a run, and return its script. words: of the run's command, after `etude`. file: its options."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "etude", *words]
    if file is not None:
        options = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        options.pop("launch", None)
        copy = folder / "options.yaml"
        make_private(copy)
        copy.write_text(yaml.safe_dump(options, allow_unicode=True, sort_keys=False), encoding="utf-8")
        command += ["--config", str(copy)]
    script = folder / "job.sh"
    log = folder / "job-%j.log"
    make_private(script)
    text = slurm.write_script(job, command, sys.executable, f"etude-{directory.name}", log)
    script.write_text(text, encoding="utf-8")
    return script


def make_private(path: Path) -> None:
    """Create a file that only its owner can read, or make an old one so: options may be secrets."""
    path.touch(mode=0o600)
    path.chmod(0o600)


def submit(directory: Path, script: Path) -> Launched:
    """Submit the job of a run, unless one is in the queue."""
    before = find_job(directory)
    if before is not None and (state := slurm.read_state(before.number)) in ("waiting", "running"):
        raise RunError(
            f"This run was submitted as job {before.number}, which is {state}. Cancel it first: "
            f"`etude launch cancel {directory}`."
        )
    job = Launched(slurm.submit(script), directory)
    write_json(directory / FOLDER / "job.json", {"number": job.number, "submitted": time.time()})
    return job


def find_job(directory: Path) -> Launched | None:
    """Return the last job of a run; None if none was submitted."""
    path = directory.absolute() / FOLDER / "job.json"
    return Launched(str(read_json(path)["number"]), directory.absolute()) if path.exists() else None


def require_job(directory: Path) -> Launched:
    """Return the last job of a run; raise if none was submitted."""
    job = find_job(directory)
    if job is None:
        raise RunError(f"{directory} has no job. Submit one: `etude launch slurm … directory={directory}`.")
    return job


def follow(job: Launched, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield what the job prints, until it has ended."""
    position = 0
    while True:
        state = slurm.read_state(job.number)
        if job.log.exists():
            with job.log.open(encoding="utf-8", errors="replace") as file:
                file.seek(position)
                while text := file.read(2**16):
                    yield text
                position = file.tell()
        if state not in ("waiting", "running"):
            return
        sleep(POLL_S)
