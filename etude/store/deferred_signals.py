"""Signals wait while something is written.

A handler of Python's runs between any two steps of the main thread, and one that raises, as Ctrl-C does, would tear a
transaction apart inside the library that makes it. So a signal that comes meanwhile is heard a moment later.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["defer_signals"]


@contextmanager
def defer_signals() -> Iterator[None]:
    """SIGINT and SIGTERM that come within are heard at the end, each as often as it came. Off the main thread no
    handler runs anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
    else:
        with _defer_signal(signal.SIGINT), _defer_signal(signal.SIGTERM):
            yield


@contextmanager
def _defer_signal(number: signal.Signals) -> Iterator[None]:
    """One signal, heard at the end. Its handler is back before anything that is raised leaves."""
    handler: Any = signal.getsignal(number)
    if handler is None:  # one that C code installed cannot be put back from here
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
