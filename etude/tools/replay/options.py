"""The options of a replay: those of the run, with another algorithm; and its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.algorithms import AlgorithmConfig
from etude.config.tree import iter_paths, to_tree
from etude.errors import ConfigError
from etude.recipes.hub import resolve_hub_names
from etude.recipes.run import directory as run_directory
from etude.recipes.run.config import Run
from etude.recipes.run.resume.precision import resolve_precision
from etude.recipes.run.resume.session_log import describe_wait
from etude.recipes.run_argument import without_secrets
from etude.tools.rollout_reader import open_journal
from etude.tools.step_index import StepIndex

PLACES = ("model.path", "model.tokenizer", "device", "threads")
"""Options about this machine. They count for both algorithms."""
LEARNING = (
    *AlgorithmConfig.model_fields,
    "data.batch_columns",
    "mini_batches",
    "ppo_epochs",
    "ess_floor",
    "train",
    "critic",
    "reference",
    "teacher",
)
"""Options that act after the rollouts of a step were made."""


@dataclass(frozen=True)
class ReplayOptions:
    """The options of a run, and those that its steps are replayed with."""

    directory: Path
    recorded: Run
    changed: Run
    changes: Mapping[str, tuple[Any, Any]]
    """The options that differ: the run's value, and the other value."""


def read_options(directory: Path, overrides: Sequence[str]) -> ReplayOptions:
    """Read the run in a directory, and change some of its options. Refuse options that change nothing in a replay."""
    for override in overrides:
        name = override.partition("=")[0].strip("+ ")
        if not any(name == known or name.startswith(f"{known}.") for known in (*PLACES, *LEARNING)):
            raise ConfigError(
                f"`etude replay` does not read `{name}`: the rollouts were made before, and a replay makes none. It "
                "reads the options of the algorithm, such as `loss` and `advantage`, and of the optimizer (`train`)."
            )
    places = [override for override in overrides if override.partition("=")[0].strip("+ ") in PLACES]
    recorded = resolve_hub_names(run_directory.read_run(directory, places, masked=without_secrets))
    changed = resolve_hub_names(run_directory.read_run(directory, overrides, masked=without_secrets))
    changed = resolve_precision(changed)
    before, after = dict(iter_paths(to_tree(recorded))), dict(iter_paths(to_tree(changed)))
    names = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    changes = {name: (before.get(name), after.get(name)) for name in names}
    return ReplayOptions(directory, recorded, changed, changes)


def check_steps(directory: Path, step: int, to: int | None) -> None:
    """Refuse a step to replay, or a last one to train on, that the journal does not have."""
    with open_journal(directory) as store:
        known = [admitted.step for admitted in StepIndex(store).admitted]
    if not known:
        advice = describe_wait(directory)
        raise ConfigError(f"The run in {directory} has not collected its first step yet. {advice}")
    for wanted, flag in ((step, "--step"), (step if to is None else to, "--to")):
        if wanted not in known:
            raise ConfigError(
                f"{flag} {wanted}: the run in {directory} has recorded the steps {known[0]} to {known[-1]}. Name one "
                "of them."
            )
    if to is not None and to < step:
        raise ConfigError(f"--to {to} is before --step {step}. Name the last step to train on, or leave it out.")
