"""Chooses the precision of a run whose options leave the choice: `train.precision=auto`.

The process that starts the run chooses, once, before its ranks start, and the choice is written with the run's options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from etude.config.tree import iter_paths, replace_option
from etude.lazy import LazyModule
from etude.observe import get_logger
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.run.directory import OPTIONS, read_options

if TYPE_CHECKING:
    import torch

    from etude.recipes.run.rules import checks
    from etude.train import flops
else:
    checks = LazyModule("etude.recipes.run.rules.checks")
    flops = LazyModule("etude.train.flops")

R = TypeVar("R", bound=Recipe)


def resolve_precision(run: R, device: torch.device | None = None) -> R:
    """Return the same run with the precisions that `auto` stands for, and log the choice.

    A run that continues keeps those that it was started with, on any machine. device: the run's device, if it is not
    one of this machine.
    """
    precisions = {"train.precision": run.train.precision}
    if isinstance(run, Run) and run.uses_critic:
        precisions["critic.train.precision"] = run.critic.train.precision
    requested = [option for option, precision in precisions.items() if precision == "auto"]
    if not requested:
        return run
    continues = run.directory is not None and (run.directory / OPTIONS).exists()
    recorded = dict(iter_paths(read_options(run.directory))) if run.directory is not None and continues else {}
    for option in requested:
        if recorded.get(option, "auto") == "auto":
            recorded[option], reason = choose_precision(device or run.compute_device())
            get_logger("recipes").info("`%s=%s`: %s.", option, recorded[option], reason)
        run = replace_option(run, option, recorded[option])
    return run


def choose_precision(device: torch.device) -> tuple[str, str]:
    """Return the precision that `auto` stands for on a device, and the reason."""
    if device.type != "cpu":
        return "bf16", "auto chooses it on a GPU"
    speedup = flops.measure_bf16_speedup()
    reason = f"auto chooses it on this processor, which computes {speedup:.2f} times as fast in bf16 as in fp32"
    return "bf16" if speedup > 1 else "fp32", reason
