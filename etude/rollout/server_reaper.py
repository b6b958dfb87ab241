"""The reaper of a server: a small process between a server and its owner, which ends the server with the owner.

A server has many processes, and would outlive its owner. So a reaper starts it, in a new session. The owner
holds a pipe to the reaper. The pipe ends if it is closed, or if the owner ends. Then the server gets SIGTERM and, after
a while, all that is left of its session is killed. A server that ends by itself ends its reaper. A killed reaper can do
nothing of this, so it reports the session's id to the owner first.

    owner ──pipe──► reaper ──► server and its processes

Run as a program, with only the standard library: `python -I -S server_reaper.py SECONDS FD COMMAND…`. FD is the number
of an open file that gets the session's id.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

__all__: list[str] = []


def _die_with_parent() -> None:
    """Have the server killed when its reaper is, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def _kill_group(group: int) -> None:
    with suppress(OSError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Start the server, and wait until it ends."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # unlike SIG_IGN, a handler is not inherited by the server
        signal.signal(signal_number, lambda *_: None)
    grace, pid_file, command = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent)
    os.write(pid_file, str(server.pid).encode())
    os.close(pid_file)

    def listen() -> None:
        with open(0, "rb", closefd=False) as pipe:
            pipe.read()
        with suppress(OSError):
            server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(grace)
        _kill_group(server.pid)

    threading.Thread(target=listen, daemon=True).start()
    code = server.wait()
    _kill_group(server.pid)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
