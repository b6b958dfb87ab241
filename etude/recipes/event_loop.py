"""The event loops of a run.

`LoopThread` runs coroutines on a thread while the caller computes. `run_outside_event_loop` starts a run where a loop
already runs, as in a notebook.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from etude.observe import get_logger
from etude.recipes.interrupt import SIGNALS, interrupt_of
from etude.running_time import EventLoop

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
        self._loop = EventLoop()
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


def run_outside_event_loop(work: Callable[[], T]) -> T:
    """Call `work` here, or in a new thread if an event loop runs in this one, and wait for its result.

    Ctrl-C and SIGTERM are forwarded to that thread. The first one goes to the thread's `Interrupt`, which finishes the
    step and saves. Without one, and the second time, the thread gets a `KeyboardInterrupt` at its next line of Python.
    """
    if not _has_running_loop():
        return work()
    outcome: Future[T] = Future()
    started, interrupted = threading.Event(), threading.Event()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            started.set()  # from here on an interrupt of this thread becomes the outcome
            if interrupted.is_set():
                raise KeyboardInterrupt
            outcome.set_result(context.run(work))
        except BaseException as error:  # raised in the caller's thread, of any type
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="etude", daemon=True)

    def on_signal(number: int, _: object) -> None:
        interrupted.set()
        if started.is_set():
            _forward_interrupt(thread, number)

    with _redirect_signals(on_signal):
        thread.start()
        thread.join()
    if not outcome.done():  # the last interrupt came while the outcome was stored
        raise KeyboardInterrupt
    return outcome.result()


@contextmanager
def _redirect_signals(handler: Callable[..., None]) -> Iterator[None]:
    """Install a handler for the signals that end a run, in the main thread, which receives them.

    The event loop's own handler would cancel the task that waits here, and the work would continue.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in SIGNALS if main}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _forward_interrupt(thread: threading.Thread, number: int) -> None:
    interrupt = interrupt_of(thread)
    if interrupt is not None and interrupt.defer_to_step_end(number):
        return
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
