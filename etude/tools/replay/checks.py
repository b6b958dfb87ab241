"""Refuses a replay whose algorithm needs what the run has not recorded, or that has no room in one process."""

from __future__ import annotations

import torch

from etude.errors import ConfigError, RunError
from etude.models.weight_files import WeightFiles
from etude.recipes.run import checks
from etude.recipes.run.config import Run
from etude.recipes.run.device import select_device
from etude.tools.doctor.machine import read_memory
from etude.tools.replay.options import ReplayOptions

TRAINING_BYTES = 16
"""Bytes that each trained weight needs: itself, its gradient and two moments, in float32."""


def check_options(options: ReplayOptions) -> None:
    """Refuse a replay that cannot be computed."""
    _check_algorithm(options)
    _check_memory(options.recorded)


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
