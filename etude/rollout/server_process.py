"""A server process: start it, check that it runs, read its errors and the end of its log, and stop it.

Its output goes to a log file, which each start extends. No process is left behind, however this process ends (see
`server_reaper`). While a server starts it may write its key to the log, so the file is readable by its owner only.
`redact_log` removes the key.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from etude.config.env import build_server_env
from etude.config.secrets import MASK

__all__ = ["ServerProcess", "find_free_port"]

REAPER_PATH = Path(__file__).with_name("server_reaper.py")
GRACE_SECONDS = 5.0
"""Seconds that a server has to end after SIGTERM."""
STOP_TIMEOUT = 15.0
"""Seconds until the reaper itself is killed, and on Linux the server with it."""
TAIL_LINES = 12
"""The number of last log lines that an error repeats."""
MAX_ERRORS = 4
"""The number of different exceptions further up in the log that an error repeats: the cause, and those it led to."""
LOG_BYTES = 262_144
"""The bytes at the end of a log in which these lines are looked for."""
EXCEPTION = re.compile(
    r"(?:\([\w-]+ pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:.]+ \[\S+\] )?"  # the prefixes of vLLM's log
    r"(?P<exception>(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?)"
)
"""The last line of a traceback: the exception's class and its message."""


class ServerProcess:
    """One server process at a time."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log
        self._reaper: subprocess.Popen[bytes] | None = None
        self._log_start, self._secret = 0, b""
        self._pid_pipe: int | None = None
        """A pipe to which the reaper writes the server's process id."""

    @property
    def is_running(self) -> bool:
        """True if its process lives."""
        if self._reaper is not None and self._reaper.poll() is None:
            return True
        self._kill_leftovers()
        return False

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, secret: str = "") -> None:
        """Start the process. Its HTTP server is not ready yet. secret: a text to remove from its log."""
        assert not self.is_running, "the server is running already"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab", opener=_open_private) as log_file:
            self._log_start, self._secret = log_file.tell(), secret.encode()
            self._pid_pipe, write_end = os.pipe()
            try:
                self._reaper = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(REAPER_PATH), str(GRACE_SECONDS), str(write_end), *command],
                    stdin=subprocess.PIPE,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    env=build_server_env(environment),
                    start_new_session=True,
                    pass_fds=[write_end],
                )
            finally:
                os.close(write_end)

    def stop(self) -> None:
        """End it with all its child processes. A process that has ended is no error."""
        if self._reaper is None:
            return
        assert self._reaper.stdin is not None
        with suppress(OSError):
            self._reaper.stdin.close()
        try:
            self._reaper.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:  # it is stopped, or the machine is slow
            self._reaper.send_signal(signal.SIGKILL)
            self._reaper.wait()
        self._kill_leftovers()
        self.redact_log()

    def _kill_leftovers(self) -> None:
        """End the processes of a reaper that was killed."""
        if self._pid_pipe is None:
            return
        pid_pipe, self._pid_pipe = self._pid_pipe, None
        pid = os.read(pid_pipe, 64)
        os.close(pid_pipe)
        if pid and self._reaper is not None and self._reaper.returncode < 0:
            with suppress(OSError):
                os.killpg(int(pid), signal.SIGKILL)

    def redact_log(self) -> None:
        """Remove the secret from its log. Its output meanwhile is appended as usual."""
        secret, self._secret = self._secret, b""
        if not secret:
            return
        with suppress(OSError), self.log.open("r+b") as log_file:
            log_file.seek(self._log_start)
            content = log_file.read()
            position = content.find(secret)
            while position >= 0:
                log_file.seek(self._log_start + position)
                log_file.write(b"*" * len(secret))
                position = content.find(secret, position + 1)

    def describe_exit(self) -> str:
        """Return how it ended, and its last lines, as a sentence."""
        status = (
            "still runs" if self.is_running or self._reaper is None else f"ended with status {self._reaper.returncode}"
        )
        lines = self._read_lines()
        tail = lines[-TAIL_LINES:]
        output = f"Its last lines:\n{_indent(tail)}" if tail else "It wrote nothing."
        errors = _find_exceptions(lines[:-TAIL_LINES], tail)
        cause = f"Its errors, the first of which may be the cause:\n{_indent(errors)}\n" if errors else ""
        return f"{self.name} {status}. The whole output is in {self.log}. {cause}{output}"

    def _read_lines(self) -> list[str]:
        """Return the lines of its log since the start, or the last ones of a long log."""
        try:
            with self.log.open("rb") as log_file:
                end = log_file.seek(0, 2)
                log_file.seek(max(self._log_start, end - LOG_BYTES))
                content = log_file.read()
                if self._secret:
                    content = content.replace(self._secret, MASK.encode())
                return content.decode(errors="replace").splitlines()
        except OSError:
            return []


def find_free_port(preferred: int = 0) -> int:
    """Return a free port of the loopback interface: the preferred one if it is free."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", preferred))
        except OSError:
            listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _find_exceptions(lines: Sequence[str], tail: Sequence[str]) -> list[str]:
    """Return the last few different exceptions of these lines, in their order, without those in the tail."""
    matches = (EXCEPTION.fullmatch(line) for line in lines)
    exceptions = dict.fromkeys(match["exception"] for match in matches if match)
    return [exception for exception in exceptions if not any(exception in line for line in tail)][-MAX_ERRORS:]


def _indent(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
