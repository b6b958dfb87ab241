"""Child processes that end with this process: how they start, how they end, and the reaper that ends the last ones.

A process that is killed cannot end its children. So each process with programs or servers has one reaper, in a separate
session. The process writes every process group that starts or ends to the reaper's pipe. When the pipe closes, the
process has ended. Then the reaper terminates the groups that have a grace period, and kills all that remain.

    process ──"+ 4711 5.0"──► reaper        then the group's program may begin
            ──"- 4711"──────►               it has ended
            ──end of pipe───►               SIGTERM, up to 5 seconds, then kill -9

`ProcessReaper` is the owner's side. Run as a program, with the standard library only, this file is the reaper.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

POLL_INTERVAL = 0.1
"""Seconds between two checks of the reaper whether a group has ended."""
_TAIL_LINES, _LINE_WIDTH = 5, 300
_DIE_WITH_PARENT = "import ctypes; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9); "
# The program below is one argument; the module that it runs takes file descriptors.
_BOOT = (
    "import importlib, json, sys; {first}sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))"
)


def boot_command(module: str, *descriptors: int, dies_with_parent: bool) -> list[str]:
    """Return the command of a Python process with this import path that calls `main(*descriptors)` of a module.

    dies_with_parent: on Linux, the process first asks the system to be killed when the thread that started it ends
    (PR_SET_PDEATHSIG). Elsewhere only the end of a pipe can end it.
    """
    code = _BOOT.format(first=_DIE_WITH_PARENT if dies_with_parent else "")
    return [sys.executable, "-c", code, json.dumps(sys.path), module, *map(str, descriptors)]


def kill_group(group: int) -> None:
    """Kill a process that started a session, and all that it started in it. A group that has ended is no error."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Return how a process ended: `exit code 1` or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"


def read_log_lines(log: Path, start: int, max_bytes: int) -> list[str]:
    """Return the lines of a log from this offset on, at most those of its last bytes; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - max_bytes))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def read_log_tail(log: Path, start: int = 0) -> str:
    """Return the last lines of a log from this offset on, as a sentence."""
    lines = read_log_lines(log, start, 2 * _TAIL_LINES * _LINE_WIDTH)
    tail = [line.strip()[:_LINE_WIDTH] for line in lines if line.strip()][-_TAIL_LINES:]
    return f"Its last lines, in {log}: " + " | ".join(tail) if tail else f"It wrote nothing to {log}."


class ProcessReaper:
    """The reaper of this process, which starts when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: dict[int, float] = {}
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._in_child)

    def add(self, group: int, grace_s: float = 0.0) -> None:
        """Have a process group killed when this process ends. grace_s: the seconds that it gets after SIGTERM."""
        with self._lock:
            self._groups[group] = grace_s
            self._send(f"+ {group} {grace_s}\n")

    def remove(self, group: int) -> None:
        """Forget a group that has ended."""
        with self._lock:
            self._groups.pop(group, None)
            self._send(f"- {group}\n")

    def ensure_running(self) -> None:
        """Start another reaper if this one was killed."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._send("")

    def _in_child(self) -> None:
        """Reset the reaper in a forked process, which gets its own. Close its end of the parent's pipe: the reaper
        waits until all ends are closed."""
        if self._process is not None and self._process.stdin is not None:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._process.stdin.fileno(), inheritable=False)
            os.close(nothing)
        self._process = None
        self._groups = {}
        self._lock = threading.Lock()

    def _send(self, message: str) -> None:
        """Send a line to the reaper. If it does not run, start one and send it every group."""
        if self._process is not None and self._process.poll() is None:
            with suppress(BrokenPipeError):
                self._write(message)
                return
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self._write("".join(f"+ {group} {grace_s}\n" for group, grace_s in self._groups.items()))

    def _write(self, text: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()


reaper = ProcessReaper()
"""The reaper of this process."""


def main() -> None:
    """Keep the list of groups until the pipe closes, then end those on it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, float] = {}
    with open(0, "rb", closefd=False) as lines:
        for line in lines:
            sign, group, *grace_s = line.decode().split()
            if sign == "+":
                groups[int(group)] = float(grace_s[0])
            else:
                groups.pop(int(group), None)
    _end_groups(groups)


def _end_groups(groups: dict[int, float]) -> None:
    """Terminate the leaders of groups with a grace period, and kill each group after its period."""
    ended = time.monotonic()
    for group, grace_s in groups.items():
        if grace_s:
            with suppress(OSError):
                os.kill(group, signal.SIGTERM)
    for group, grace_s in sorted(groups.items(), key=lambda item: item[1]):
        with suppress(OSError):
            while time.monotonic() < ended + grace_s:
                os.killpg(group, 0)
                time.sleep(POLL_INTERVAL)
        kill_group(group)


if __name__ == "__main__":
    main()
