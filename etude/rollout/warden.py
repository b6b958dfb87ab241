"""The warden of a server process: starts it, knows whether it lives, says what it said last, and ends it.

What a server writes goes to a file, which is kept: each start adds to it. Nothing that was started is left behind,
however this process ends (see `keeper`). The file is its owner's alone to read while a server starts, which may write
its key there; `hush` takes that out.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from etude.config.env import for_a_server
from etude.config.secrets import MASK

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
        self._from, self._hidden = 0, b""
        self._told: int | None = None
        """Where the keeper has written whom it keeps."""

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        if self._keeper is not None and self._keeper.poll() is None:
            return True
        self._sweep()
        return False

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, hidden: str = "") -> None:
        """Start it. What it is to be asked over HTTP is not there yet. hidden: what nobody is to find in its log."""
        assert not self.running, "a warden has one server"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab", opener=_private) as said:
            self._from, self._hidden = said.tell(), hidden.encode()
            self._told, told = os.pipe()
            try:
                self._keeper = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(KEEPER), str(GRACE), str(told), *command],
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=for_a_server(environment),
                    start_new_session=True,
                    pass_fds=[told],
                )
            finally:
                os.close(told)

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
        self._sweep()
        self.hush()

    def _sweep(self) -> None:
        """End what a keeper has left that was killed itself."""
        if self._told is None:
            return
        told, self._told = self._told, None
        kept = os.read(told, 64)
        os.close(told)
        if kept and self._keeper is not None and self._keeper.returncode < 0:
            with suppress(OSError):
                os.killpg(int(kept), signal.SIGKILL)

    def hush(self) -> None:
        """Take out of its log what is hidden. What it writes meanwhile comes after."""
        hidden, self._hidden = self._hidden, b""
        if not hidden:
            return
        with suppress(OSError), self.log.open("r+b") as said:
            said.seek(self._from)
            begun = said.read()
            found = begun.find(hidden)
            while found >= 0:
                said.seek(self._from + found)
                said.write(b"*" * len(hidden))
                found = begun.find(hidden, found + 1)

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
                found = said.read()
                if self._hidden:
                    found = found.replace(self._hidden, MASK.encode())
                lines = found.decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(f"    {line}" for line in lines[-TAIL:])


def free_port(wanted: int = 0) -> int:
    """A port of the loopback interface that nobody listens on: the one that is wanted, if it is such."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", wanted))
        except OSError:
            taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
