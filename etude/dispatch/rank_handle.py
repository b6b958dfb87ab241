"""One rank of a crew, seen from the controller: its pending replies, its last sign of life, and its name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from etude.child_process import read_log_tail
from etude.dispatch.messages import CallError, CallResult, CallStarted, PayloadRef, RankLogRecord, StartupStatus
from etude.errors import CrewError

EXIT_TIMEOUT = 10.0
"""Seconds that a killed rank may take to end."""


class RankFailure:
    """The reply to a call that raised an error in a rank."""

    def __init__(self, rank: RankHandle, error: CallError) -> None:
        self.rank = rank
        self.call_error = error

    def to_exception(self, operation: str) -> Exception:
        """Return the exception to raise: an `EtudeError` as it was raised, any other described in a `CrewError`."""
        if self.call_error.error is not None:
            self.call_error.error.add_note(f"Raised in {self.rank}: {self.call_error.description}")
            return self.call_error.error
        return CrewError(f"{self.rank} failed in {operation}: {self.call_error.description}. Its log: {self.rank.log}")


class RankHandle:
    """A rank that starts and ends with the crew. Subclasses define how it is reached and killed."""

    def __init__(self, rank: int, log: Path, on_log: Callable[[RankHandle, RankLogRecord], None]) -> None:
        self.rank = rank
        self.log = log
        self._on_log = on_log
        self.startup_step = "starting Python"
        """Its current step while it starts."""
        self.ready = False
        self.silent = 0.0
        """Seconds since its last message; 0 before its first."""
        self._heard = self._heard_ever = False
        self.closed = threading.Event()
        """Set when no more messages will come."""
        self._replies: dict[int, Future[Any]] = {}
        self._on_start: dict[int, Callable[[], None]] = {}

    def __str__(self) -> str:
        return f"Rank {self.rank}"

    # -- for subclasses -------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Its process id, on its machine."""
        raise NotImplementedError

    def send(self, message: object) -> None:
        """Send a message without waiting. A rank that has ended gets nothing; the watchdog notices that."""
        raise NotImplementedError

    def dump_stacks(self) -> None:
        """Have it write the stacks of all its threads to its log."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill it and all its child processes now."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until it has ended."""
        raise NotImplementedError

    @property
    def has_exited(self) -> bool:
        """True if it has ended, or no more messages will come."""
        raise NotImplementedError

    def exit_reason(self) -> str:
        """Return how it ended."""
        raise NotImplementedError

    def state(self) -> str:
        """Return the system's state of a process that does not answer; empty if there is none."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""
        return {"T": ": it was stopped by a signal", "D": ": it waits for a disk", "Z": ": it has ended"}.get(
            letter, ""
        )

    def log_tail(self) -> str:
        """Return the last lines of its log, as a sentence."""
        return read_log_tail(self.log)

    # -- pending replies ------------------------------------------------------------------------------------------

    def expect_reply(self, number: int, on_start: Callable[[], None] | None = None) -> Future[Any]:
        """Return the future reply to the call of this number."""
        future: Future[Any] = Future()
        self._replies[number] = future
        if on_start is not None:
            self._on_start[number] = on_start
        return future

    def discard_reply(self, number: int) -> None:
        """Forget a reply that no caller waits for."""
        self._replies.pop(number, None)
        self._on_start.pop(number, None)

    def fail(self, error: Exception) -> None:
        """Fail all pending replies with this error."""
        for number in list(self._replies):
            self._settle(number, error)

    def pass_time(self, seconds: float) -> None:
        """Add seconds to its silence unless a message came meanwhile."""
        self.silent = self.silent + seconds if self._heard_ever and not self._heard else 0.0
        self._heard = False

    def on_message(self, message: object = None) -> None:
        """Record a sign of life, and handle the message, on the thread that receives it."""
        self._heard = self._heard_ever = True
        match message:
            case StartupStatus(what):
                self.startup_step = what
            case CallResult(number, body):
                self._settle(number, body)
            case CallError(number):
                self._settle(number, RankFailure(self, message))
            case CallStarted(number):
                on_start = self._on_start.pop(number, None)
                if on_start is not None:
                    on_start()
            case RankLogRecord():
                self._on_log(self, message)

    def _settle(self, number: int, result: PayloadRef | RankFailure | Exception) -> None:
        future = self._replies.pop(number, None)
        self._on_start.pop(number, None)
        if future is None:
            return
        with suppress(InvalidStateError):  # the caller has cancelled it
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
