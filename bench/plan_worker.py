"""A rank of `bench.plan`, in a module of its own: ranks import it by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._profiler import _EventType
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
        """The most bytes that this rank held; all of them ask together, and the first one tells.

        Among them is what gloo's threads have not let go of yet when an exchange is over, which is not the same twice.
        """
        return measured(lambda: perform(self._run))


def measured(work: Callable[[], object]) -> int:
    """The most bytes that tensors and kernels held at once, of what was taken within, as torch's allocator tells.

    It is asked for the sum, in which it counts what other threads give back: gloo's do, of what was exchanged.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        work()
    todo: list[Any] = list(told.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    seen = []
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            seen.append((event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size))
    _, total, size = min(seen)
    return int(max(total for _, total, _ in seen) - (total - max(size, 0)))
