"""The keeper of a server: a small process between a server and whoever started it, that ends the one with the other.

A server is many processes, and outlives whoever started it. So it is started by a keeper, in a session of its own. When
the keeper's pipe ends, because it was closed or because the process that held it is no more, the server is asked to end
and, after a while, all that is left of its session is killed. A server that ends by itself ends its keeper. A keeper
that is killed can do nothing of this, so it has told whoever started it which session that is.

    whoever ──pipe──► keeper ──► server and its processes

Run as a program, with nothing but the standard library: `python -I -S server_reaper.py SECONDS TOLD COMMAND…`, where
TOLD is the number of an open file that the session's is written to.
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
    """On Linux, the server is killed when its keeper is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def _kill_group(group: int) -> None:
    with suppress(OSError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Keep one server."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            signal_number, lambda *_: None
        )  # which, unlike SIG_IGN, a program that is started does not inherit
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
