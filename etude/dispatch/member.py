"""One rank of a crew, seen from the controller: its process, the pipe to it, and what it owes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any

from etude.config.env import for_one_machine
from etude.dispatch.messages import At, Begun, Done, Failed, Line, Said
from etude.errors import CrewError

__all__ = ["Member", "Raised"]

# First of all, on Linux, the process asks to be killed when the thread that started it ends: PR_SET_PDEATHSIG, SIGKILL.
# Elsewhere the end of the pipe ends it, unless it is stopped.
_BOOT = (
    "import ctypes, json, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9); "
    "sys.path[:] = json.loads(sys.argv[2]); "
    "from etude.dispatch.rank import main; main(int(sys.argv[1]))"
)
_LINES, _WIDTH = 5, 300
_ENDING = 10.0


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
    """A process that began with the crew and ends with it."""

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
        self._process: Popen[bytes] | None = None
        self._line: Line | None = None

    def __str__(self) -> str:
        return f"Rank {self.rank}" + (f" (process {self._process.pid})" if self._process else "")

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    def start(self, *descriptors: int) -> None:
        """Start the process. It ends with the thread that calls this, if not before."""
        ours, theirs = Pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        given = (theirs.fileno(), *descriptors)
        command = [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)]
        with self.log.open("ab") as log:
            # In a session of its own: Ctrl-C is the controller's to answer, and killing it ends what it started.
            self._process = Popen(
                command,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                pass_fds=given,
                start_new_session=True,
                env=for_one_machine(),
            )
        theirs.close()
        self._line = Line(ours)
        threading.Thread(target=self._read, name=f"etude-rank-{self.rank}", daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message. A rank that has ended gets nothing: that is noticed elsewhere."""
        assert self._line is not None
        with suppress(OSError):
            self._line.send(message)

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

    def trace(self) -> None:
        """Have it write to its log where each of its threads stands, whatever they are at."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End it, and all it started, now."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Until it is gone."""
        if self._process is not None and self._line is not None:
            with suppress(TimeoutExpired):
                self._process.wait(_ENDING)
            self.over.wait(_ENDING)
            self._line.close()

    @property
    def ended(self) -> bool:
        """Whether the process has ended, or its pipe has."""
        return self._process is not None and (self._process.poll() is not None or self.over.is_set())

    def end(self) -> str:
        """How it ended."""
        assert self._process is not None
        try:
            code = self._process.wait(_ENDING)
        except TimeoutExpired:
            return "it closed its pipe, and goes on"
        if code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", as the system does where memory runs out" if -code == signal.SIGKILL else "")

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
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 2 * _LINES * _WIDTH))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        told = [line.strip()[:_WIDTH] for line in lines if line.strip()][-_LINES:]
        return f"Its last lines, in {self.log}: " + " | ".join(told) if told else f"It wrote nothing to {self.log}."

    # -- on its own thread ----------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Take what comes from it, until nothing does."""
        assert self._line is not None
        while (message := self._line.receive()) is not None:
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
        self.over.set()

    def _settle(self, number: int, came: bytes | Raised | Exception) -> None:
        future = self._owed.pop(number, None)
        self._begun.pop(number, None)
        if future is None:
            return
        with suppress(InvalidStateError):  # whoever waited has left
            if isinstance(came, Exception):
                future.set_exception(came)
            else:
                future.set_result(came)
