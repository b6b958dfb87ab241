"""A rank of `bench.plan`, in a module of its own: ranks import it by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from etude.protocols import spread
from etude.recipes.recipe import Recipe
from etude.tools.rehearsal import perform

__all__ = ["Performer", "measured"]


class Performer:
    """Performs a step with the other ranks."""

    def __init__(self, run: Recipe) -> None:
        self._run = run

    @spread()
    def peak(self) -> int:
        """The most bytes that this rank held; all of them ask together, and the first one tells."""
        return measured(lambda: perform(self._run))


def measured(work: Callable[[], object]) -> int:
    """The most bytes that tensors and kernels held at once, of what was taken within, as torch's allocator tells."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        work()
    events: Any = told.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
