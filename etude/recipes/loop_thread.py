"""A separate thread with an event loop, for coroutines that run while the caller computes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, Self, TypeVar

from etude.observe import get_logger

T = TypeVar("T")
SLICE_S = 0.2
"""Seconds of one wait. An exception that is set for a thread, as in a notebook, is raised between two of them."""
CLOSE_TIMEOUT_S = 60.0
"""Seconds that `close` waits for the tasks of the loop."""


class LoopThread:
    """The event loop of a run. Its tasks run while the run's own thread computes.

    `run` waits for one coroutine, which bounds the wait. `close` cancels the remaining ones.
    """

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """on_wait: called on the caller's thread before it waits."""
        self._on_wait = on_wait
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="etude-collect", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its result. If the wait is interrupted, it is cancelled."""
        future = self.submit(work)
        self._on_wait()
        try:
            while not wait([future], SLICE_S).done:
                pass
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine on the loop, and return its future."""
        assert threading.current_thread() is not self._thread, "the loop would wait for itself"
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel the tasks of the loop, and end its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            get_logger("recipes").warning(
                "Tasks of the run do not end %g seconds after they were cancelled. They are left behind.",
                CLOSE_TIMEOUT_S,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._closing.wait())
