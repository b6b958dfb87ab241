"""Deferral of signals during a write.

Python runs a signal handler between any two steps of the main thread. A handler that raises, as that of Ctrl-C does,
would interrupt a transaction inside the database library. So signals that arrive during a write are delivered after it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def defer_signals() -> Iterator[None]:
    """Deliver SIGINT and SIGTERM that arrive inside at the end, each as often as it came. Other threads run no handlers
    anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
    else:
        with _defer_signal(signal.SIGINT), _defer_signal(signal.SIGTERM):
            yield


@contextmanager
def _defer_signal(number: signal.Signals) -> Iterator[None]:
    """Defer one signal. Its handler is restored before any exception leaves."""
    handler: Any = signal.getsignal(number)
    if handler is None:  # a handler of C code cannot be restored from here
        yield
        return
    received: list[int] = []
    try:
        signal.signal(number, lambda number, _: received.append(number))
        yield
    finally:
        signal.signal(number, handler)
        for signal_number in received:
            signal.raise_signal(signal_number)
