"""Ctrl-C and SIGTERM: the first one finishes the step and saves, the second stops at once. Before the first step, each
stops at once."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_thread_interrupts: dict[int, Interrupt] = {}
"""Listeners of threads other than the main one, which receives all signals, by thread id."""


class Interrupt:
    """Catches SIGINT and SIGTERM during a run. `stop_requested` is set when the run should stop after this step.

    Python delivers signals to the main thread only. In other threads `run_outside_event_loop` waits for Ctrl-C and
    forwards it.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._warning_filters = ExitStack()
        self.stop_requested = False
        self.may_finish_step = True
        """False while no step is under way, so that an interrupt need not wait for one."""

    def _on_signal(self, number: int, _: object) -> None:
        if not self.defer_to_step_end(number):
            if not self.stop_requested:
                self._warn("Stopping: no step has started yet.")
            self.stop_requested = True
            # The coroutines that this cuts short are never awaited; hide the warnings about that.
            self._warning_filters.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            raise KeyboardInterrupt

    def defer_to_step_end(self, number: int) -> bool:
        """Record a signal, and return True if a step is to be finished and saved before the run stops."""
        if self.stop_requested or not self.may_finish_step:
            return False
        self.stop_requested = True
        again = "Press Ctrl-C once more" if number == signal.SIGINT else "Send the signal once more"
        self._warn(f"Stopping after this step, which is saved. {again} to stop at once.")
        return True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        else:
            _thread_interrupts[threading.get_ident()] = self
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
        if _thread_interrupts.get(threading.get_ident()) is self:
            del _thread_interrupts[threading.get_ident()]
        self._warning_filters.close()


def interrupt_of(thread: threading.Thread) -> Interrupt | None:
    """Return the listener for Ctrl-C of a thread that is not the main one."""
    return _thread_interrupts.get(thread.ident or 0)
