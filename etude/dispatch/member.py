"""One rank of a crew, seen from the controller: what it owes, what it was last heard of, and how it is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from etude.dispatch.messages import At, Begun, Done, Failed, Said, Sent
from etude.errors import CrewError

__all__ = ["ENDING", "Member", "Raised", "ending"]

ENDING = 10.0
"""Seconds that the end of a rank may take once it was ended."""
_LINES, _WIDTH = 5, 300


class Raised:
    """What came of a call that went wrong in a rank."""

    def __init__(self, rank: Member, failed: Failed) -> None:
        self.rank, self.failed = rank, failed

    def error(self, what: str) -> Exception:
        """The error to raise for it: ours as it was raised, any other told in a sentence."""
        if self.failed.error is not None:
            self.failed.error.add_note(f"Raised in {self.rank}: {self.failed.told}")
            return self.failed.error
        return CrewError(f"{self.rank} failed in {what}: {self.failed.told}. Its log: {self.rank.log}")


class Member:
    """A rank that began with the crew and ends with it. How it is reached and ended is each kind's own."""

    def __init__(self, rank: int, log: Path, said: Callable[[Member, Said], None]) -> None:
        self.rank, self.log, self._said = rank, log, said
        self.at = "starting Python"
        """What it does while it starts."""
        self.ready = False
        self.silent = 0.0
        """Seconds since it was last heard; none have passed before it first was."""
        self._heard = self._known = False
        self.over = threading.Event()
        """Nothing more comes from it."""
        self._owed: dict[int, Future[Any]] = {}
        self._begun: dict[int, Callable[[], None]] = {}

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

    def trace(self) -> None:
        """Have it write to its log where each of its threads stands, whatever they are at."""
        raise NotImplementedError

    def kill(self) -> None:
        """End it, and all it started, now."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until it is gone."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether it has ended, or nothing comes from it any more."""
        raise NotImplementedError

    def end(self) -> str:
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

    def last_words(self) -> str:
        """The last lines of its log, as a sentence."""
        return ending(self.log)

    # -- what it owes ---------------------------------------------------------------------------------------------

    def owe(self, number: int, begun: Callable[[], None] | None = None) -> Future[Any]:
        """What will come of a call or a question of this number."""
        future: Future[Any] = Future()
        self._owed[number] = future
        if begun is not None:
            self._begun[number] = begun
        return future

    def forgive(self, number: int) -> None:
        """Nobody waits for this any more."""
        self._owed.pop(number, None)
        self._begun.pop(number, None)

    def fail(self, error: Exception) -> None:
        """Tell everybody who waits for it that nothing will come."""
        for number in list(self._owed):
            self._settle(number, error)

    def pass_time(self, seconds: float) -> None:
        """So many seconds have passed in which it may have been heard, or not."""
        self.silent = self.silent + seconds if self._known and not self._heard else 0.0
        self._heard = False

    def heard(self, message: object = None) -> None:
        """It lives, and says this, on the thread that listens to it."""
        self._heard = self._known = True
        match message:
            case At(what):
                self.at = what
            case Done(number, body):
                self._settle(number, body)
            case Failed(number):
                self._settle(number, Raised(self, message))
            case Begun(number):
                begun = self._begun.pop(number, None)
                if begun is not None:
                    begun()
            case Said():
                self._said(self, message)

    def _settle(self, number: int, came: Sent | Raised | Exception) -> None:
        future = self._owed.pop(number, None)
        self._begun.pop(number, None)
        if future is None:
            return
        with suppress(InvalidStateError):  # whoever waited has left
            if isinstance(came, Exception):
                future.set_exception(came)
            else:
                future.set_result(came)


def ending(log: Path) -> str:
    """The last lines of a log, as a sentence."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2 * _LINES * _WIDTH))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    told = [line.strip()[:_WIDTH] for line in lines if line.strip()][-_LINES:]
    return f"Its last lines, in {log}: " + " | ".join(told) if told else f"It wrote nothing to {log}."
