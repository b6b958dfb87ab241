"""Where reduced metrics go, and what happens when a destination misbehaves.

A sink is opened once, receives one mapping of numbers per step and is closed once. A run never depends on one: each
sink is `SafeSink`, and a sink that speaks to a service works in the `BackgroundSink`, where a service that does not
answer costs the run nothing but a bounded wait at the end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from etude.observe.log import get_logger

__all__ = ["BackgroundSink", "RunInfo", "SafeSink", "Sink"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a sink is told about the run it records."""

    name: str
    """What people call the run."""
    directory: Path
    """The run's own directory; local sinks write here."""
    steps: int | None = None
    """How many steps the run will take in all, if that is known."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The resolved configuration as plain data, secrets already masked."""


class Sink(Protocol):
    """A destination for metrics. Steps are counted from 1."""

    @property
    def name(self) -> str:
        """What to call this sink in a sentence."""
        ...

    def open(self, run: RunInfo) -> None:
        """Make ready to receive; called once, first."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the numbers of one step."""
        ...

    def close(self) -> None:
        """Make durable what was received; called once, last."""
        ...


class SafeSink:
    """A sink that cannot fail: at the first exception it is closed as far as that goes, warned about, and left out."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.alive = True

    @property
    def name(self) -> str:
        """The name of the sink that is guarded."""
        return self._sink.name

    def open(self, run: RunInfo) -> None:
        """Open the sink."""
        self._run_safely("opening", lambda: self._sink.open(run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand on one step."""
        self._run_safely(f"logging step {step}", lambda: self._sink.log(step, values))

    def close(self) -> None:
        """Close the sink."""
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
                "The %s sink failed while %s and is switched off; the run goes on without it. %s: %s",
                self.name,
                action,
                type(error).__name__,
                error,
            )


class BackgroundSink:
    """A sink whose work is done by a thread of its own.

    Consumes: calls of the training thread, which only queue. Produces: the same calls, in order, on the thread.
    Waits for: nobody while logging; the thread, for at most `patience` seconds, when closing.
    Unblocked by: the thread finishing. What the sink raises there ends the thread, which closes the sink first; once
    it has, or once patience is at an end, the same is raised here.
    """

    def __init__(self, sink: Sink, close_timeout: float = 60.0, capacity: int = 1000) -> None:
        self._sink = sink
        self._close_timeout = close_timeout
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=capacity)
        self._thread = threading.Thread(target=self._work, name=f"etude-{sink.name}", daemon=True)
        self._error: Exception | None = None

    @property
    def name(self) -> str:
        """The name of the sink that is worked for."""
        return self._sink.name

    def open(self, run: RunInfo) -> None:
        """Start the thread, which opens the sink."""
        self._thread.start()
        self._submit(lambda: self._sink.open(run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue one step."""
        snapshot = dict(values)
        self._submit(lambda: self._sink.log(step, snapshot))

    def close(self) -> None:
        """Queue the closing and wait for it, within bounds."""
        self._submit(self._sink.close)
        self._submit(None)
        self._thread.join(self._close_timeout)
        if self._thread.is_alive():
            raise self._error or TimeoutError(
                f"It did not finish within {self._close_timeout:g} s; what it had not yet sent is lost."
            )
        self._raise()

    def _submit(self, job: Callable[[], None] | None) -> None:
        self._raise()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            message = f"It does not answer: {self._jobs.maxsize} calls are waiting for it."
            raise self._error or TimeoutError(message) from None

    def _raise(self) -> None:
        if self._error is not None and not self._thread.is_alive():
            raise self._error

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:
            # Raised again on the training thread, and an exit that a library asks for is not the run's own.
            name = type(error).__name__
            self._error = error if isinstance(error, Exception) else RuntimeError(f"It was ended by {name}: {error}")
            with suppress(BaseException):
                self._sink.close()
