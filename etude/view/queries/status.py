"""The status of a run, from its sessions and the times of its files. The run's lock is not touched."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from etude.observe.jsonl import METRICS_FILE
from etude.recipes.run.directory import JOURNAL
from etude.recipes.run.resume.session_log import SESSIONS, Session

Status = Literal["running", "done", "stopped", "failed", "killed", "silent", "empty"]
"""`killed`: the process ended without a word. `silent`: a process on another machine, which may be killed, has written
nothing for a while. `empty`: no session and no step."""
SILENT_S = 600.0
"""Seconds after the last write from which a run that cannot be seen is `silent`."""
FILES = (METRICS_FILE, JOURNAL, f"{JOURNAL}-wal", SESSIONS)


def find_status(
    directory: Path, sessions: Sequence[Session], last_step: int | None, steps: int | None, now: float | None = None
) -> Status:
    """Return the status of a run. steps: its length, if it is known."""
    fresh = (time.time() if now is None else now) - written_at(directory, sessions) < SILENT_S
    if not sessions:  # `etude replay` wrote it
        if last_step is not None and steps is not None and last_step >= steps:
            return "done"
        return "running" if fresh else "stopped" if last_step is not None else "empty"
    session = sessions[-1]
    if session.how is not None:
        return session.how
    if session.host != socket.gethostname():
        return "running" if fresh else "silent"
    return "running" if _lives(session) else "killed"


def written_at(directory: Path, sessions: Sequence[Session]) -> float:
    """Return the time of the last write to a run, in seconds since 1970; 0 if nothing was written.

    A reader creates an empty log beside the journal, so an empty file does not count.
    """
    if sessions and sessions[-1].ended_at is not None:
        return sessions[-1].ended_at
    times = [0.0]
    for name in FILES:
        try:
            found = (directory / name).stat()
        except OSError:
            continue
        if found.st_size:
            times.append(found.st_mtime)
    return max(times)


def _lives(session: Session) -> bool:
    """Return whether the process of a session lives. A later process with its number is not it."""
    try:
        os.kill(session.process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    began = _began_at(session.process)
    return began is None or began <= session.began_at + 1.0


def _began_at(process: int) -> float | None:
    """Return the time at which a process began, where the system says so."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")).split()[
            1
        ]
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return int(booted) + ticks / os.sysconf("SC_CLK_TCK")
