"""One rank of a crew, seen from the controller: what it owes, what it was last heard of, and how it is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from etude.dispatch.messages import CallError, CallResult, CallStarted, PayloadRef, RankLogRecord, StartupStatus
from etude.errors import CrewError

__all__ = ["EXIT_TIMEOUT", "RankFailure", "RankHandle", "read_log_tail"]

EXIT_TIMEOUT = 10.0
"""Seconds that the end of a rank may take once it was ended."""
_TAIL_LINES, _LINE_WIDTH = 5, 300


class RankFailure:
    """What came of a call that went wrong in a rank."""

    def __init__(self, rank: RankHandle, error: CallError) -> None:
        self.rank, self.call_error = rank, error

    def to_exception(self, operation: str) -> Exception:
        """The error to raise for it: ours as it was raised, any other told in a sentence."""
        if self.call_error.error is not None:
            self.call_error.error.add_note(f"Raised in {self.rank}: {self.call_error.description}")
            return self.call_error.error
        return CrewError(f"{self.rank} failed in {operation}: {self.call_error.description}. Its log: {self.rank.log}")


class RankHandle:
    """A rank that began with the crew and ends with it. How it is reached and ended is each kind's own."""

    def __init__(self, rank: int, log: Path, on_log: Callable[[RankHandle, RankLogRecord], None]) -> None:
        self.rank, self.log, self._on_log = rank, log, on_log
        self.startup_step = "starting Python"
        """What it does while it starts."""
        self.ready = False
        self.silent = 0.0
        """Seconds since it was last heard; none have passed before it first was."""
        self._heard = self._heard_ever = False
        self.closed = threading.Event()
        """Nothing more comes from it."""
        self._replies: dict[int, Future[Any]] = {}
        self._on_start: dict[int, Callable[[], None]] = {}

    def __str__(self) -> str:
        return f"Rank {self.rank}"

    # -- each kind's own ------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Of its process, on its machine."""
        raise NotImplementedError

    def send(self, message: object) -> None:
        """Send a message, without waiting. A rank that has ended gets nothing: that is noticed elsewhere."""
        raise NotImplementedError

    def dump_stacks(self) -> None:
        """Have it write to its log where each of its threads stands, whatever they are at."""
        raise NotImplementedError

    def kill(self) -> None:
        """End it, and all it started, now."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until it is gone."""
        raise NotImplementedError

    @property
    def has_exited(self) -> bool:
        """Whether it has ended, or nothing comes from it any more."""
        raise NotImplementedError

    def exit_reason(self) -> str:
        """How it ended."""
        raise NotImplementedError

    def state(self) -> str:
        """What the system says of a process that does not answer, where it says anything."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""
        return {"T": ": it was stopped by a signal", "D": ": it waits for a disk", "Z": ": it has ended"}.get(
            letter, ""
        )

    def log_tail(self) -> str:
        """The last lines of its log, as a sentence."""
        return read_log_tail(self.log)

    # -- what it owes ---------------------------------------------------------------------------------------------

    def expect_reply(self, number: int, on_start: Callable[[], None] | None = None) -> Future[Any]:
        """What will come of a call or a question of this number."""
        future: Future[Any] = Future()
        self._replies[number] = future
        if on_start is not None:
            self._on_start[number] = on_start
        return future

    def discard_reply(self, number: int) -> None:
        """Nobody waits for this any more."""
        self._replies.pop(number, None)
        self._on_start.pop(number, None)

    def fail(self, error: Exception) -> None:
        """Tell everybody who waits for it that nothing will come."""
        for number in list(self._replies):
            self._settle(number, error)

    def pass_time(self, seconds: float) -> None:
        """So many seconds have passed in which it may have been heard, or not."""
        self.silent = self.silent + seconds if self._heard_ever and not self._heard else 0.0
        self._heard = False

    def on_message(self, message: object = None) -> None:
        """It lives, and says this, on the thread that listens to it."""
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
        with suppress(InvalidStateError):  # whoever waited has left
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def read_log_tail(log: Path) -> str:
    """The last lines of a log, as a sentence."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2 * _TAIL_LINES * _LINE_WIDTH))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    tail = [line.strip()[:_LINE_WIDTH] for line in lines if line.strip()][-_TAIL_LINES:]
    return f"Its last lines, in {log}: " + " | ".join(tail) if tail else f"It wrote nothing to {log}."
