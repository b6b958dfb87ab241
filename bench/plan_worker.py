"""A rank of `bench.plan`, in its own module, because ranks import it by name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from etude.protocols import dispatch_mode
from etude.recipes.recipe import Recipe
from etude.tools.plan.dry_run import real_run

__all__ = ["Performer", "measured"]


class Performer:
    """Performs a step with the other ranks."""

    def __init__(self, run: Recipe) -> None:
        self._run = run

    @dispatch_mode()
    def peak(self) -> int:
        """Return the peak memory of this rank in bytes; all ranks call it, and the first rank's result counts."""
        return measured(lambda: real_run(self._run))


def measured(work: Callable[[], object]) -> int:
    """Yield the peak of the memory allocated within the block, in bytes, as measured by torch's allocator."""
    with _by_every_thread(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    todo: list[Any] = list(profiled.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    seen = []
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            seen.append((event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size))
    _, total, size = min(seen)
    return int(max(total for _, total, _ in seen) - (total - max(size, 0)))


@contextmanager
def _by_every_thread() -> Iterator[None]:
    """Let torch's allocator count the allocations and releases of all threads within the block.

    By default it counts profiled threads only, and a tensor that a thread of gloo releases last would stay in the sum
    forever.
    """
    (library,) = (Path(torch.__file__).parent / "lib").glob("libc10.*")
    counts = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    before, counts.value = counts.value, True
    try:
        yield
    finally:
        counts.value = before
