"""Several runs of the algorithms demo: selection, training, and the report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from etude.algorithms import LOSSES
from etude.config.compose import compose, multirun
from etude.config.override import parse_override
from etude.config.secrets import mask, mask_text
from etude.config.show import to_yaml
from etude.config.tree import to_tree
from etude.demo.tabular.run import DemoRun, train
from etude.errors import ConfigError, EtudeError
from etude.integrity import write_text
from etude.observe import RunInfo, open_run_log

LONGEST_FOLDER = 100
"""The longest directory name, far below the limits of file systems."""
LEARNT = 0.9
"""The smallest share of the possible gain that counts as learnt."""


@dataclass
class ComparedRun:
    """One run of a comparison, and its result."""

    name: str
    run: DemoRun | None = None
    number: int | None = None
    """The job's index in a sweep, whose jobs may have the same name."""
    refused: str = ""
    """The error sentence of a run that cannot start. It is printed in the run's place."""
    curve: list[float] = field(default_factory=list)
    """J before the first step and after each."""
    optimum: float = 1.0
    seconds: float = 0.0

    @property
    def folder(self) -> str:
        """The name of the run's directory; a job of a sweep has its number in front."""
        label = re.sub(r"[^\w.=-]+", "_", self.name, flags=re.ASCII)
        return (label if self.number is None else f"{self.number}_{label}")[:LONGEST_FOLDER]

    @property
    def share(self) -> float:
        """The gain as a share of the possible gain: 1 is the optimum, below 0 is worse than the start."""
        return (self.curve[-1] - self.curve[0]) / (self.optimum - self.curve[0])

    @property
    def learnt(self) -> bool:
        """True if the run came near the optimum."""
        return not self.refused and self.share >= LEARNT


def select_runs(overrides: Sequence[str], file: Path | None, *, sweep: bool) -> list[ComparedRun]:
    """Return the jobs of a sweep, or the chosen loss, or every loss if none is chosen."""
    if sweep:
        return _sweep_runs(overrides, file)
    if _chooses_loss(overrides, file):
        run = compose(DemoRun, overrides, file=file)
        return [ComparedRun(to_tree(run)["loss"]["name"], run)]
    runs = []
    for name in LOSSES:
        try:
            runs.append(ComparedRun(name, compose(DemoRun, [*overrides, f"loss={name}"], file=file)))
        except ConfigError as error:
            runs.append(ComparedRun(name, refused=str(error)))
    if all(entry.refused for entry in runs):
        raise ConfigError(runs[0].refused)
    return runs


def train_run(entry: ComparedRun, directory: Path, on_step: Callable[[], None]) -> None:
    """Train one run, and write its metrics and options to its directory; `on_step` is called after each step."""
    run = entry.run
    assert run is not None
    info = RunInfo(entry.name, directory, run.steps, mask(to_tree(run)))
    began = time.perf_counter()
    directory.mkdir(parents=True, exist_ok=True)
    with open_run_log(run.observe.model_copy(update={"console": "off"}), info) as log:
        write_text(directory / "run.yaml", to_yaml(run))
        try:
            for progress in train(run, log):
                entry.curve.append(progress.expected_reward)
                entry.optimum = progress.optimum
                entry.seconds = time.perf_counter() - began
                on_step()
        except EtudeError as error:
            entry.refused = str(error)
            on_step()


def build_report(runs: Sequence[ComparedRun], directory: Path, figure: Path) -> dict[str, Any]:
    """Return the results as plain data."""
    return {
        "directory": str(directory),
        "figure": str(figure),
        "runs": [
            {"name": entry.name, "refused": entry.refused}
            if entry.refused or entry.run is None
            else {
                "name": entry.name,
                "folder": entry.folder,
                "loss": to_tree(entry.run)["loss"]["name"],
                "before": entry.curve[0],
                "after": entry.curve[-1],
                "optimum": entry.optimum,
                "share": entry.share,
                "learnt": entry.learnt,
                "seconds": entry.seconds,
            }
            for entry in runs
        ],
    }


def new_directory(parent: Path) -> Path:
    """Create a new directory, named by the time."""
    name, count = time.strftime("%Y-%m-%d_%H-%M-%S"), 1
    while True:
        directory = parent / (name if count == 1 else f"{name}_{count}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            count += 1
        except OSError as error:
            raise ConfigError(
                f"`directory` is {parent}, and no directory can be created there: {error.strerror}. Choose another."
            ) from error
        else:
            return directory


def _sweep_runs(overrides: Sequence[str], file: Path | None) -> list[ComparedRun]:
    """Return one entry for each job of a sweep, named by the overrides that differ."""
    with TemporaryDirectory() as scratch:
        jobs = multirun(DemoRun, overrides, lambda _: None, file=file, directory=Path(scratch))
    _refuse_differing([job.run for job in jobs])
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    names = [mask_text(" ".join(text for text in job.overrides if text not in shared)) for job in jobs]
    return [
        ComparedRun(name or f"job {job.number}", job.run, job.number) for name, job in zip(names, jobs, strict=True)
    ]


def _refuse_differing(runs: Sequence[DemoRun]) -> None:
    """Refuse a sweep over options of the console or the directory, which its jobs share."""
    shared: dict[str, Callable[[DemoRun], object]] = {
        "directory": lambda run: run.directory,
        "observe.console": lambda run: run.observe.console,
        "observe.level": lambda run: run.observe.level,
    }
    for key, value_of in shared.items():
        values = list(dict.fromkeys(map(value_of, runs)))
        if len(values) > 1:
            raise ConfigError(
                f"The jobs of a sweep share one console and one directory, and this sweep has several values of "
                f"`{key}`: {', '.join(map(str, values))}. Give it one value."
            )


def _chooses_loss(overrides: Sequence[str], file: Path | None) -> bool:
    if any(parse_override(text, example="steps").path.split(".")[0] == "loss" for text in overrides):
        return True
    if file is None:
        return False
    compose(DemoRun, file=file)  # raises a `ConfigError` for an unreadable file
    return "loss" in OmegaConf.load(file)
