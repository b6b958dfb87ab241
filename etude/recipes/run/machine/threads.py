"""The processor threads that trainer and engine of a run compute with."""

from __future__ import annotations

from dataclasses import dataclass

from etude.lazy import torch


@dataclass(frozen=True)
class ThreadShares:
    """The threads of a rank that computes on the CPU."""

    trainer: int
    engine: int | None = None
    """The threads of the embedded engine; None without one."""

    def __str__(self) -> str:
        """Describe them, as the inputs of a run record them."""
        return f"trainer {self.trainer}" + ("" if self.engine is None else f", engine {self.engine}")


def rank_threads(threads: int | None, ranks: int) -> int:
    """Return the number of threads of each rank. threads: the option of that name."""
    return threads or max(1, torch.get_num_threads() // ranks)


def share_threads(total: int, engine: int | None, *, both_compute: bool) -> ThreadShares:
    """Divide the threads of a rank among the trainer and the embedded engine.

    engine: the engine's own number, if it is given. both_compute: they compute at the same time, and share the threads.
    """
    if not both_compute:
        return ThreadShares(total, engine or total)
    sampler = engine or max(1, total // 2)
    return ThreadShares(max(1, total - sampler), sampler)
