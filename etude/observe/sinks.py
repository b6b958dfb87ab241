"""Sinks: the destinations of reduced metrics, and the wrappers that protect a run from them.

A sink is opened once, receives one mapping of numbers per step, and is closed once. A run never depends on a sink. A
`SafeSink` wraps each one. A `BackgroundSink` wraps a sink that calls a service: a service that does not respond costs
the run only a bounded wait at the end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from etude.observe.log import get_logger


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The facts about a run that its sinks need."""

    name: str
    """The name of the run."""
    directory: Path
    """The run directory; local sinks write there."""
    steps: int | None = None
    """The number of steps of the whole run; None if it is unknown."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The resolved configuration as plain data, with masked secrets."""


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """A rollout that trackers show. The order of its fields is that of a table's columns."""

    rollout: int
    """Its id."""
    reward: float
    advantage: float | None
    """The mean over the tokens that the policy wrote; None if it wrote none."""
    prompt: str
    text: str
    """All that the policy wrote."""


class Sink(Protocol):
    """A destination for metrics. Steps are counted from 1."""

    @property
    def name(self) -> str:
        """The sink's name in messages."""
        ...

    def open(self, run: RunInfo) -> None:
        """Prepare to receive metrics; called once, first."""
        ...

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        """Receive the numbers of one step. late: more numbers of an earlier step."""
        ...

    def log_rollouts(self, step: int, rollouts: Sequence[SampledRollout]) -> None:  # noqa: ARG002
        """Receive some rollouts of a step, before its numbers. A sink that inherits from this class ignores them."""
        return

    def close(self) -> None:
        """Store everything that was received; called once, last."""
        ...


class SafeSink(Sink):
    """A sink that cannot raise: its first exception is logged, and the sink is closed and skipped from then on."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.alive = True

    @property
    def name(self) -> str:
        return self._sink.name

    def open(self, run: RunInfo) -> None:
        self._run_safely("opening", lambda: self._sink.open(run))

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        self._run_safely(f"logging step {step}", lambda: self._sink.log(step, values, late=late))

    def log_rollouts(self, step: int, rollouts: Sequence[SampledRollout]) -> None:
        self._run_safely(f"logging rollouts of step {step}", lambda: self._sink.log_rollouts(step, rollouts))

    def close(self) -> None:
        self._run_safely("closing", self._sink.close)

    def _run_safely(self, action: str, call: Callable[[], None]) -> None:
        if not self.alive:
            return
        try:
            call()
        except Exception as error:
            self.alive = False
            with suppress(Exception):
                self._sink.close()
            get_logger("observe").warning(
                "The %s sink failed while %s and is switched off; the run continues without it. %s: %s",
                self.name,
                action,
                type(error).__name__,
                error,
            )


class BackgroundSink(Sink):
    """A sink that works on its own thread.

    Consumes: calls of the training thread, which puts them into a queue. Produces: the same calls, in order, on the
    thread. Waits for: nothing while logging; `close` waits for the thread, at most `close_timeout` seconds. Unblocked
    by: the end of the thread.

    An exception of the sink ends the thread, which closes the sink first. The next call after that, or the timeout of
    `close`, raises the exception here.
    """

    def __init__(self, sink: Sink, close_timeout: float = 60.0, capacity: int = 1000) -> None:
        self._sink = sink
        self._close_timeout = close_timeout
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=capacity)
        self._thread = threading.Thread(target=self._work, name=f"etude-{sink.name}", daemon=True)
        self._error: Exception | None = None
        self._given_up = False

    @property
    def name(self) -> str:
        return self._sink.name

    def open(self, run: RunInfo) -> None:
        self._thread.start()
        self._submit(lambda: self._sink.open(run))

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        snapshot = dict(values)
        self._submit(lambda: self._sink.log(step, snapshot, late=late))

    def log_rollouts(self, step: int, rollouts: Sequence[SampledRollout]) -> None:
        self._submit(lambda: self._sink.log_rollouts(step, rollouts))

    def close(self) -> None:
        """Queue the close, and wait for it up to the timeout."""
        self._submit(self._sink.close)
        self._submit(None)
        self._thread.join(self._close_timeout)
        if self._thread.is_alive():
            raise self._error or TimeoutError(
                f"It did not finish within {self._close_timeout:g} s; the metrics it had not sent are lost."
            )
        self._raise()

    def _submit(self, job: Callable[[], None] | None) -> None:
        self._raise()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._given_up = True  # there is no room to tell the thread to end
            message = f"It does not respond: {self._jobs.maxsize} calls are waiting for it."
            raise self._error or TimeoutError(message) from None

    def _raise(self) -> None:
        if self._error is not None and not self._thread.is_alive():
            raise self._error

    def _next_job(self) -> Callable[[], None] | None:
        """Return the next job; None at the end. What waits for a service that answers again is still sent."""
        if not self._given_up:
            return self._jobs.get()
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            self._sink.close()
            return None

    def _work(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                job()
        except BaseException as error:
            # It is raised again on the training thread. A library's SystemExit must not end the run.
            name = type(error).__name__
            self._error = error if isinstance(error, Exception) else RuntimeError(f"{name} ended it: {error}")
            with suppress(BaseException):
                self._sink.close()
