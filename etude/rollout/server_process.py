"""A server process: start it, check that it runs, read its errors and the end of its log, and stop it.

Its output goes to a log file, which each start extends. No process is left behind, however this process ends, because
its reaper knows the server (`etude.child_process`). While a server starts it may write its key to the log, so the file
is readable by its owner only. `redact_log` removes the key.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from etude.child_process import describe_exit, kill_group, read_log_lines, reaper
from etude.config.env import build_server_env
from etude.config.secrets import MASK

GRACE_SECONDS = 5.0
"""Seconds that a server has to end after SIGTERM."""
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
        self.name = name
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._group: int | None = None
        """The process group, which the reaper knows."""
        self._log_start = 0
        self._secret = b""

    @property
    def is_running(self) -> bool:
        """True if its process lives. One that has ended by itself leaves nothing that it started."""
        reaper.ensure_running()
        if self.process is not None and self.process.poll() is None:
            return True
        self._end_group()
        return False

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, secret: str = "") -> None:
        """Start the process. Its HTTP server is not ready yet. secret: a text to remove from its log."""
        assert not self.is_running, "the server is running already"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log_file:
            self._log_start = log_file.tell()
            self._secret = secret.encode()
            # It first reads a line, which is written once the reaper knows it. So no server runs unknown to the reaper.
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", 'read -r go || exit 125; exec "$@" </dev/null', "etude", *command],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=build_server_env(environment),
                start_new_session=True,
            )
        self._group = self.process.pid
        reaper.add(self._group, GRACE_SECONDS)
        assert self.process.stdin is not None
        with suppress(OSError), self.process.stdin as first_line:  # it has ended; the health check notices that
            first_line.write(b"go\n")

    def stop(self) -> None:
        """End it with all its child processes. A process that has ended is no error."""
        if self.process is None:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        self._end_group()
        with suppress(subprocess.TimeoutExpired):  # a hung driver may hold even a killed process
            self.process.wait(GRACE_SECONDS)
        self.redact_log()

    def _end_group(self) -> None:
        """Kill all that is left, once: the group's number may go to another one later."""
        group = self._group
        self._group = None
        if group is not None:
            kill_group(group)
            reaper.remove(group)

    def redact_log(self) -> None:
        """Remove the secret from its log. Its output meanwhile is appended as usual."""
        secret = self._secret
        self._secret = b""
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
        code = None if self.process is None or self.is_running else self.process.returncode
        status = "still runs" if code is None else f"ended ({describe_exit(code)})"
        lines = self._read_lines()
        tail = lines[-TAIL_LINES:]
        output = f"Its last lines:\n{_indent(tail)}" if tail else "It wrote nothing."
        errors = _find_exceptions(lines[:-TAIL_LINES], tail)
        cause = f"Its errors, the first of which may be the cause:\n{_indent(errors)}\n" if errors else ""
        return f"{self.name} {status}. The whole output is in {self.log}. {cause}{output}"

    def _read_lines(self) -> list[str]:
        """Return the lines of its log since the start, or the last ones of a long log."""
        lines = read_log_lines(self.log, self._log_start, LOG_BYTES)
        secret = self._secret.decode()
        return [line.replace(secret, MASK) for line in lines] if secret else lines


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
