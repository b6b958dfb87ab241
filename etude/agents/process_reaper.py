"""The guard: a process that ends what a runner has started, should the runner end before it could.

A runner that is killed ends nothing. So each process that has runners has one guard, in a session of its own, that is
told of every process group that comes and goes. When the pipe ends, the runner has, and what is still there is killed.

    runner ──"+ 4711"──► guard         then the group's program may begin
           ──"- 4711"──►               it is over
           ──end of pipe──►            kill -9 of all that is left

`ProcessReaper` is the side of the runner; run as a program, with nothing but the standard library, this is the guard.
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
    """The guard of this process, which starts when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._in_child)

    def add(self, group: int) -> None:
        """Have a process group ended when this process ends."""
        with self._lock:
            self._groups.add(group)
            self._send(f"+ {group}\n")

    def remove(self, group: int) -> None:
        """The group is over."""
        with self._lock:
            self._groups.discard(group)
            self._send(f"- {group}\n")

    def _in_child(self) -> None:
        """A process that was forked from this one has a guard of its own, and holds no end of this one's pipe: while
        anybody does, the guard waits."""
        if self._process is not None and self._process.stdin is not None:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._process.stdin.fileno(), inheritable=False)
            os.close(nothing)
        self._process, self._groups, self._lock = None, set(), threading.Lock()

    def _send(self, message: str) -> None:
        """Tell the guard; where there is none, or none any more, start one and tell it of every group there is."""
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
    """Keep the list of groups until the pipe ends, and kill what is on it then."""
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
