"""The process reaper: a process that kills the programs a runner started, if the runner ends before it could.

A runner that is killed cannot end its children. So each process with runners has one reaper, in its own session. The
runner writes every process group that starts or ends to the reaper's pipe. When the pipe closes, the runner has ended,
and the reaper kills the remaining groups.

    runner ──"+ 4711"──► reaper        then the group's program may begin
           ──"- 4711"──►               it has ended
           ──end of pipe──►            kill -9 of all remaining groups

`ProcessReaper` is the runner's side. Run as a program, with the standard library only, this file is the reaper.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

__all__ = ["ProcessReaper"]


class ProcessReaper:
    """The reaper of this process, which starts when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._in_child)

    def add(self, group: int) -> None:
        """Have a process group killed when this process ends."""
        with self._lock:
            self._groups.add(group)
            self._send(f"+ {group}\n")

    def remove(self, group: int) -> None:
        """Forget a group that has ended."""
        with self._lock:
            self._groups.discard(group)
            self._send(f"- {group}\n")

    def _in_child(self) -> None:
        """Reset the reaper in a forked process, which gets its own. Close its end of the parent's pipe: the reaper
        waits until all ends are closed."""
        if self._process is not None and self._process.stdin is not None:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._process.stdin.fileno(), inheritable=False)
            os.close(nothing)
        self._process, self._groups, self._lock = None, set(), threading.Lock()

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
        self._write("".join(f"+ {group}\n" for group in self._groups))

    def _write(self, text: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()


def main() -> None:
    """Keep the list of groups until the pipe closes, then kill those on it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    with open(0, "rb", closefd=False) as lines:
        for line in lines:
            sign, _, group = line.decode().strip().partition(" ")
            (groups.add if sign == "+" else groups.discard)(int(group))
    for process_group in groups:
        with suppress(OSError):
            os.killpg(process_group, signal.SIGKILL)


if __name__ == "__main__":
    main()
