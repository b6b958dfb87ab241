"""The warden of a server process: starts it, knows whether it lives, says what it said last, and ends it.

What a server writes goes to a file, which is kept: each start adds to it. Nothing that was started is left behind,
however this process ends (see `keeper`).
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from etude.config.env import for_a_server

__all__ = ["Warden", "free_port"]

KEEPER = Path(__file__).with_name("keeper.py")
GRACE = 5.0
"""Seconds that a server has to end when it is asked to."""
ENDING = 15.0
"""Seconds until a keeper itself is killed, and on Linux the server with it."""
TAIL = 12
"""Last lines of its log that an error repeats."""
READ = 16_384
"""Bytes at the end of a log that they are looked for in."""


class Warden:
    """One server process at a time."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log
        self._keeper: subprocess.Popen[bytes] | None = None
        self._from = 0

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._keeper is not None and self._keeper.poll() is None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. What it is to be asked over HTTP is not there yet."""
        assert not self.running, "a warden has one server"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as said:
            self._from = said.tell()
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(KEEPER), str(GRACE), *command],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=for_a_server(environment),
                start_new_session=True,
            )

    def stop(self) -> None:
        """End it, with all that it started. One that has ended stays so."""
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        with suppress(OSError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(ENDING)
        except subprocess.TimeoutExpired:  # stopped, or held up by the machine
            self._keeper.send_signal(signal.SIGKILL)
            self._keeper.wait()

    def ending(self) -> str:
        """How it ended, and what it said last, as a sentence goes on."""
        how = "still runs" if self.running or self._keeper is None else f"ended with status {self._keeper.returncode}"
        tail = self.tail()
        told = f" Its last lines:\n{tail}" if tail else " It said nothing."
        return f"{self.name} {how}. The whole output is in {self.log}.{told}"

    def tail(self) -> str:
        """The last lines that it wrote since it was started."""
        try:
            with self.log.open("rb") as said:
                end = said.seek(0, 2)
                said.seek(max(self._from, end - READ))
                lines = said.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(f"    {line}" for line in lines[-TAIL:])


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
