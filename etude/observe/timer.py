"""Where the time of a step goes.

`with timer("update"):` measures a phase; phases inside it get longer names (`update/forward`). Seconds are sums, so
a phase entered twice counts twice, and each phase also reports its share of the step. This is the time that the
calling thread spent: work queued on an accelerator is counted where somebody waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from etude.observe.metrics import Mean, Metrics, Sum

__all__ = ["Timer"]


class Timer:
    """A stopwatch for nested phases, for one thread and one step."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_enter: Callable[[str], None] = lambda _: None
    ) -> None:
        """entered: is told the name of each phase as it begins."""
        self._clock, self._on_enter = clock, on_enter
        self._started = clock()
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time spent inside the `with` block, also when it raises."""
        self._open.append(phase)
        name = "/".join(self._open)
        self._seconds.setdefault(name, 0.0)
        self._on_enter(name)
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - began
            self._open.pop()

    def metrics(self) -> Metrics:
        """`time/<phase>` and `time/step` in seconds, `share/<phase>` as a fraction of the step, up to this moment."""
        step = self._clock() - self._started
        metrics = Metrics({"time/step": Sum.of(step)})
        for phase, seconds in self._seconds.items():
            metrics.add(f"time/{phase}", Sum.of(seconds))
            metrics.add(f"share/{phase}", Mean.over(seconds, step))
        return metrics
