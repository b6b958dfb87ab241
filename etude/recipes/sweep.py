"""Several runs from one command line, one after another: one for each combination of the listed values."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from etude.config.compose import SweepJob, multirun
from etude.config.secrets import mask_text
from etude.errors import ConfigError, EtudeError, RunError
from etude.observe import get_logger, make_console
from etude.recipes.interrupt import Interrupt
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.run.directory import new_directory
from etude.recipes.sweep_summary import print_summary

R = TypeVar("R", bound=Recipe)

LONGEST = 160
"""Most bytes of a run's name: file systems take 255, with what is added to them."""


def sweep(
    kind: type[R],
    train: Callable[[R, Interrupt], Path],
    overrides: Sequence[str],
    file: Path | None,
    preset: Path | None = None,
) -> Path:
    """Train each run of a sweep in its own directory below a common one, and return that directory.

    Every run is composed before the first one starts. A run that fails does not stop the others. At the end a table has
    a line for each run. Started again with the same `directory`, a sweep continues with the unfinished runs.
    """
    with TemporaryDirectory() as scratch:
        jobs = multirun(kind, overrides, lambda run: run, file=file, preset=preset, directory=Path(scratch))
    directories = {job.run.directory for job in jobs}
    if len(directories) > 1:
        raise ConfigError(
            "A sweep has one directory, and in it one for each run; several were given with `directory=…`. Give one, "
            "and each run is named in it by its own values."
        )
    stores = Counter(job.run.agent.store for job in jobs if isinstance(job.run, Run) and job.run.agent.store)
    if any(count > 1 for count in stores.values()):
        raise ConfigError(
            f"A store keeps the rollouts of one run, and `agent.store={stores.most_common(1)[0][0]}` is given to "
            f"{stores.most_common(1)[0][1]} of these. Leave it out, and each run keeps its own."
        )
    parent = jobs[0].run.directory or new_directory(Path("runs"), "sweep")
    names = _names(jobs)
    failed: dict[str, str] = {}
    with Interrupt(get_logger("recipes").warning) as interrupt:
        for job, name in zip(jobs, names, strict=True):
            try:
                run = job.run.model_copy(update={"directory": parent / name})
                train(run.with_preset(preset), interrupt)
            except Exception as error:  # reported, and does not stop the other runs
                is_etude_error = isinstance(error, EtudeError)
                failed[name] = f"{name}: {error}" if is_etude_error else f"{name}: {type(error).__name__}: {error}"
                get_logger("recipes").error("%s", failed[name], exc_info=not is_etude_error)
            if interrupt.stop_requested:
                raise KeyboardInterrupt
    print_summary(make_console(jobs[0].run.observe.console), parent, names, failed)
    if failed:
        raise RunError(f"{len(failed)} of {len(jobs)} runs in {parent} failed. {' '.join(failed.values())}")
    return parent


def _names(jobs: Sequence[SweepJob[R, R]]) -> list[str]:
    """Return a directory name for each run, made of the values that only it has."""
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    own = (" ".join(text for text in job.overrides if text not in shared) for job in jobs)
    names = (_short(re.sub(r"[^\w.]+", "-", mask_text(text)).strip("-")) for text in own)
    return [f"{job.number}-{name}" if name else str(job.number) for job, name in zip(jobs, names, strict=True)]


def _short(name: str) -> str:
    """Shorten a name for file systems: the end of a long one becomes a hash of the whole."""
    if len(name.encode()) <= LONGEST:
        return name
    end = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{name.encode()[: LONGEST - len(end) - 1].decode(errors='ignore')}-{end}"
