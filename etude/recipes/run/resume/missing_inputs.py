"""Refuses a run that lacks a model, data, or a file that it names. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from etude.config.together import told_together
from etude.data.files import no_such_data, split_source
from etude.errors import ConfigError
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.run.directory import OPTIONS, is_module
from etude.recipes.run.rules.required import find_missing_options


@told_together
def check_required(run: Recipe, unwritten: Collection[str] = ()) -> Iterator[ConfigError]:
    """Refuse a run without a model or data, and a new one that names a file that is not there. A run that continues
    compares its files with those that it began with. unwritten: `train`, `val`: its files are written later."""
    yield from find_missing_options(run)
    if run.directory is None or not (run.directory / OPTIONS).exists():
        data = {"train": run.data.train, "val": run.data.val}
        yield from _find_missing_data(file for name in data.keys() - unwritten for file in data[name])
        yield from _find_missing_code(run)


@told_together
def check_scored(run: Run) -> Iterator[ConfigError]:
    """Refuse to score a model on no tasks, and on files that are not there."""
    if not run.data.val:
        yield ConfigError("There is nothing to score on: give tasks with `data.val=[tasks.parquet]`.")
    yield from _find_missing_data(run.data.val)


def _find_missing_data(names: Iterable[str]) -> Iterator[ConfigError]:
    for name in names:
        _, data = split_source(name)
        file = Path(data).expanduser()
        if not is_module(data) and not file.exists():
            yield no_such_data(file)


def _find_missing_code(run: Recipe) -> Iterator[ConfigError]:
    """Yield a problem for each file of the user's code that is not there."""
    if not isinstance(run, Run):
        return
    environments = [environment.options for environment in run.env.environments()]
    code = [path for options in environments for path in (options.code, *options.tools)]
    named = {
        "reward": run.reward.files(),
        "env": [Path(path.rpartition(":")[0]) for path in code],
        "agent": [Path(path.rpartition(":")[0]) for path in run.agent.names],
    }
    for option, files in named.items():
        for file in dict.fromkeys(files):
            if file.suffix == ".py" and not file.expanduser().is_file():
                yield ConfigError(
                    f"`{option}` names code in {file}, and there is no such file (seen from {Path.cwd()}). Correct the "
                    "path."
                )
