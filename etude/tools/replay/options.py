"""The options of a replay: those of the run, with another algorithm, for one process without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etude.algorithms import AlgorithmConfig
from etude.config.tree import to_tree
from etude.dispatch import CrewConfig
from etude.errors import ConfigError, RunError
from etude.models.weight_files import WeightFiles
from etude.recipes.hub import resolve_hub_names
from etude.recipes.run import checks
from etude.recipes.run import directory as run_directory
from etude.recipes.run.config import Run
from etude.recipes.run.device import select_device
from etude.recipes.run_argument import without_secrets
from etude.tools.doctor.machine import read_memory
from etude.train import MeshConfig

__all__ = ["ReplayOptions", "one_process", "read_options"]

PLACES = ("model.path", "model.tokenizer", "device", "threads")
"""Options about this machine. They count for both algorithms."""
LEARNING = (
    *AlgorithmConfig.model_fields,
    *("mini_batches", "ppo_epochs", "ess_floor", "train", "critic", "reference", "teacher"),
)
"""Options that act after the rollouts of a step were made."""
TRAINING_BYTES = 16
"""Bytes that each trained weight needs: itself, its gradient and two moments, in float32."""


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
    before, after = dict(_flat(to_tree(recorded))), dict(_flat(to_tree(changed)))
    names = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    changes = {name: (before.get(name), after.get(name)) for name in names}
    options = ReplayOptions(directory, recorded, changed, changes)
    _check_algorithm(options)
    _check_memory(recorded)
    return options


def one_process(run: Run) -> Run:
    """Return the same run on one rank, in this process."""
    train = run.train.model_copy(update={"engine": "local"})
    critic = run.critic.model_copy(update={"train": run.critic.train.model_copy(update={"engine": "local"})})
    alone = {"ranks": 1, "cluster": "local", "mesh": MeshConfig(), "crew": CrewConfig()}
    return run.model_copy(update={**alone, "train": train, "critic": critic})


def _flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a tree of options with its dotted path."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _check_algorithm(options: ReplayOptions) -> None:
    """Refuse an algorithm that needs what the run has not recorded."""
    recorded, changed = options.recorded, options.changed
    needed = changed.required_columns()
    if checks.uses_critic(changed) and not checks.uses_critic(recorded):
        raise ConfigError(
            "This advantage needs a critic, and the run has trained none: its predictions would mean nothing. Choose "
            "an advantage without a critic, such as `advantage=rloo`."
        )
    if "greedy_reward" in needed and "greedy_reward" not in recorded.required_columns():
        raise ConfigError(
            "This advantage compares with the greedy answer to each task, and the run has sampled none. Choose another "
            "advantage, such as `advantage=rloo`."
        )
    if "anchor" in needed and not recorded.env.is_enabled:
        raise ConfigError(
            "This advantage compares states that an environment names, and the run has no environment. Choose another "
            "advantage, such as `advantage=rloo`."
        )
    # Only the algorithm is checked: rollouts that are recorded need no rule about how stale they may get.
    if options.changes:
        checks.check_algorithm(changed.model_copy(update={"max_staleness": 0, "allow_unbounded_ratios": False}))


def _check_memory(run: Run) -> None:
    """Refuse a run of several ranks whose weights have no room in one process."""
    if run.ranks == 1 or run.lora.is_enabled or run.model.freeze:
        return
    assert run.model.path is not None, "a run has a model"
    device = select_device(run)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_memory()[1]
    needed = TRAINING_BYTES * WeightFiles(run.model.path).num_weights
    if needed > free:
        raise RunError(
            f"The run trained on {run.ranks} ranks, and a replay computes in one process: its weights, gradient and "
            f"moments need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {device}. Replay on a "
            "machine with more memory, or with `device=cpu`, where the processor has more."
        )
