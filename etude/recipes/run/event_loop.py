"""Runs code that starts event loops where a loop may already run, as in a notebook."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from etude.recipes.run.interrupt import SIGNALS, interrupt_of

T = TypeVar("T")


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
