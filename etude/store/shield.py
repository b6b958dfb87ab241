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

__all__ = ["undisturbed"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def undisturbed() -> Iterator[None]:
    """SIGINT and SIGTERM that come within are heard at the end. Off the main thread no handler runs anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}
    try:
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None:  # one that C code installed cannot be put back from here
                before[number] = handler
                signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(came):
            signal.raise_signal(late)
