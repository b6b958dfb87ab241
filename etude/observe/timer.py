"""The timer of a step's phases.

`with timer("update"):` measures a phase; a phase inside it gets a longer name (`update/forward`). Seconds are sums, so
a phase that is entered twice counts twice. Each phase also reports its share of the step. It is the time of the calling
thread: work that is queued on an accelerator counts in the phase that waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from etude.observe.metrics import Mean, Metrics, Sum


class Timer:
    """A stopwatch for nested phases, for one thread and one step."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_enter: Callable[[str], None] = lambda _: None
    ) -> None:
        """on_enter: called with the name of each phase when it begins."""
        self._clock, self._on_enter = clock, on_enter
        self._started = clock()
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the `with` block, also if it raises."""
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
        """Return `time/<phase>` and `time/step` in seconds, and `share/<phase>` as a fraction of the step, up to
        now."""
        step = self._clock() - self._started
        metrics = Metrics({"time/step": Sum.of(step)})
        for phase, seconds in self._seconds.items():
            metrics.add(f"time/{phase}", Sum.of(seconds))
            metrics.add(f"share/{phase}", Mean.over(seconds, step))
        return metrics
