"""Work that waits on event loops of its own, started where a loop may be running already, as in a notebook."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from etude.recipes.interrupt import interrupt_of

__all__ = ["apart"]

T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    """Do it here; or in a thread of its own, where an event loop is running in this one, and wait for its end.

    Ctrl-C is passed on to that thread: to what listens for it there, which finishes the step and saves; else, and the
    second time, as a `KeyboardInterrupt` at the next line of Python that runs there.
    """
    if not _in_a_loop():
        return work()
    outcome: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:  # whatever it is, it is raised where the work was asked for
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="etude", daemon=True)
    started = False
    while True:
        try:
            if not started:
                started = True
                thread.start()
            return outcome.result()
        except KeyboardInterrupt:
            if outcome.done():
                raise
            _pass_on(thread)


def _pass_on(thread: threading.Thread) -> None:
    listens = interrupt_of(thread)
    if listens is not None and listens.finishes_first():
        return
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
