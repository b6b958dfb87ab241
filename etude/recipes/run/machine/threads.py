"""The processor threads that trainer and engine of a run compute with."""

from __future__ import annotations

from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.run.machine.device import select_device
from etude.recipes.run.rules.checks import threads_of
from etude.rollout import TorchEngineConfig


def split_threads(run: Run, rollout: TorchEngineConfig, total: int) -> tuple[int, int]:
    """Return the numbers of threads of the trainer and of the embedded engine, of a rank that computes on the CPU.

    total: the threads of the rank. With `max_staleness` above 0 both compute at the same time, and share them.
    """
    if not run.max_staleness:
        return total, rollout.threads or total
    engine = rollout.threads or max(1, total // 2)
    return max(1, total - engine), engine


def trainer_threads(run: Run) -> int:
    """Return the number of threads that the trainer of a rank computes with."""
    total = threads_of(run)
    if select_device(run).type != "cpu" or not isinstance(run.rollout, TorchEngineConfig):
        return total
    return split_threads(run, run.rollout, total)[0]


def describe_threads(run: Recipe) -> str:
    """Return the numbers of threads of each rank, as its inputs record them; empty where a GPU computes.

    Call it before the run's models are built, which takes the engine's threads from those of this process.
    """
    if select_device(run).type != "cpu":
        return ""
    total = threads_of(run)
    if not isinstance(run, Run) or not isinstance(run.rollout, TorchEngineConfig):
        return f"trainer {total}"
    trainer, engine = split_threads(run, run.rollout, total)
    return f"trainer {trainer}, engine {engine}"
