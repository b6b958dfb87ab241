"""The log of a run's metrics: each step is measured, reduced once, and passed to every sink.

    with RunLog(sinks, run) as log:
        for step in range(1, steps + 1):
            with log.step(step) as at:
                with at.timer("update"):
                    at.add(update(batch))

A step that raises writes no metrics, because they would cover half a step only. The exception propagates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, Self, TypeVar

from etude.observe.console import FunctionReporter, ProgressReporter
from etude.observe.log import get_logger
from etude.observe.metrics import Mean, Metric, Metrics, Sum
from etude.observe.sinks import RunInfo, SafeSink, SampledRollout, Sink

T = TypeVar("T")


class ProgressDisplay(Protocol):
    """A display of a run's progress."""

    def show_phase(self, step: int, name: str) -> None:
        """Show the current phase of a step."""
        ...

    def progress(self, description: str, total: float | None) -> AbstractContextManager[ProgressReporter]:
        """Report the progress of work inside a step."""
        ...


class SafeDisplay:
    """A display that cannot disturb the run: its first error is logged, and switches it off."""

    def __init__(self, display: ProgressDisplay | None) -> None:
        """display: None shows nothing."""
        self._display = display

    def show_phase(self, step: int, name: str) -> None:
        """Show the current phase of a step."""
        self._run_safely(lambda display: display.show_phase(step, name))

    @contextmanager
    def progress(self, description: str, total: float | None) -> Iterator[ProgressReporter]:
        """Report the progress of work inside a step."""
        context = self._run_safely(lambda display: display.progress(description, total))
        bar = None if context is None else self._run_safely(lambda _: context.__enter__())

        def advance(amount: float) -> None:
            if bar is not None:
                self._run_safely(lambda _: bar.advance(amount))

        try:
            yield FunctionReporter(advance)
        finally:
            if context is not None and bar is not None:
                self._run_safely(lambda _: context.__exit__(None, None, None))

    def _run_safely(self, call: Callable[[ProgressDisplay], T]) -> T | None:
        if self._display is None:
            return None
        try:
            return call(self._display)
        except Exception as error:
            self._display = None
            get_logger("observe").warning("The display failed and is switched off: %s.", error)
            return None


def null_progress(description: str, total: float | None) -> AbstractContextManager[ProgressReporter]:  # noqa: ARG001
    """Return a progress reporter without output."""
    return nullcontext(FunctionReporter())


class Timer:
    """A stopwatch for the phases of one step, on one thread.

    `with timer("update"):` measures a phase; a phase inside it gets a longer name (`update/forward`). Seconds are sums,
    so a phase that is entered twice counts twice. Each phase also reports its share of the step. It is the time of the
    calling thread: work that is queued on an accelerator counts in the phase that waits for it.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_enter: Callable[[str], None] = lambda _: None
    ) -> None:
        """on_enter: called with the name of each phase when it begins."""
        self._clock = clock
        self._on_enter = on_enter
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


class StepRecorder:
    """The metrics and the timer of the current step."""

    def __init__(self, number: int, timer: Timer) -> None:
        self.number = number
        self.timer = timer
        self.metrics = Metrics()

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Merge metrics into those of the step."""
        self.metrics.merge(metrics)


class RunLog:
    """The owner of the sinks: it opens them, passes them each step, and closes them. No sink can stop the run.

    With `every` above 1, the metrics of consecutive steps are merged. They are written at each step that `every`
    divides, at the last step of the run, at a `flush`, and at the end.

    An earlier start of the run wrote the steps up to `last_written_step`. They are not written again, because a
    replayed step measures less than the original did.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        run: RunInfo,
        every: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        last_written_step: int = -1,
        display: ProgressDisplay | None = None,
    ) -> None:
        """display: shows the current phase and its progress."""
        self._last_written_step = last_written_step
        self._display = SafeDisplay(display)
        self._sinks = [SafeSink(sink) for sink in sinks]
        self._run = run
        self._every = every
        self._clock = clock
        self._pending = Metrics()
        self._finished = 0
        self._warned: set[str] = set()
        for sink in self._sinks:
            sink.open(run)

    @contextmanager
    def step(self, number: int) -> Iterator[StepRecorder]:
        """Measure one step, and its time."""
        step = StepRecorder(number, Timer(self._clock, lambda phase: self._display.show_phase(number, phase)))
        yield step
        if number <= self._last_written_step:
            return
        step.add(step.timer.metrics())
        self._pending.merge(step.metrics)
        self._finished = number
        if self.is_written(number):
            self._write()

    def is_written(self, step: int) -> bool:
        """Return whether the metrics of a step are written at its end."""
        return step > self._last_written_step and (step % self._every == 0 or step == self._run.steps)

    def add_rollouts(self, step: int, rollouts: Sequence[SampledRollout]) -> None:
        """Pass some rollouts of a step to the sinks."""
        for sink in self._sinks:
            sink.log_rollouts(step, rollouts)

    def add_late(self, step: int, metrics: Metrics) -> None:
        """Write metrics of a step that were measured after it had ended."""
        values = metrics.reduce()
        for sink in self._sinks:
            sink.log(step, values, late=True)

    def progress(self, description: str, total: float | None) -> AbstractContextManager[ProgressReporter]:
        """Report the progress of long work inside a step on the run's display."""
        return self._display.progress(description, total)

    def flush(self) -> None:
        """Write the pending metrics."""
        if len(self._pending) > 0:
            self._write()

    def close(self) -> None:
        """Write the pending metrics, and close every sink. A second call has no effect."""
        self.flush()
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _write(self) -> None:
        values = self._pending.reduce()
        self._pending = Metrics()
        for name, value in values.items():
            if not math.isfinite(value) and name not in self._warned:
                self._warned.add(name)
                get_logger("observe").warning(
                    "The metric %r is %s at step %d. This is logged once.", name, value, self._finished
                )
        for sink in self._sinks:
            sink.log(self._finished, values)
