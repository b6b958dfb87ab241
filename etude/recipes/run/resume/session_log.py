"""The sessions of a run in `sessions.jsonl`: each start of the training process, and how it ended.

    {"at": 1795210221.7, "began": 40, "process": 4711, "host": "node-3", "preset": "grpo", "device": …, "versions": …}
    {"at": 1795211904.2, "ended": 60, "how": "done", "message": ""}

`began` and `ended` are the last finished step at that time. A session that was killed has a start and no end. Training
does not depend on this file.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from etude.config.secrets import mask_text
from etude.errors import EtudeError
from etude.observe import get_logger

SESSIONS = "sessions.jsonl"
SessionEnd = Literal["done", "stopped", "failed"]
"""`done`: all steps are done; `stopped`: the user interrupted it; `failed`: an error ended it."""
PACKAGES = ("etude", "torch", "transformers", "numpy")
"""The packages whose versions are recorded."""
LONGEST = 2000
"""Most characters of an error that are written."""


@dataclass(frozen=True, slots=True)
class Session:
    """One session of a run."""

    began_at: float
    """Wall-clock time in seconds since 1970."""
    first_step: int
    """The last step that was finished when it began; 0 for a new run."""
    process: int
    host: str
    """The name of the machine of the process."""
    ended_at: float | None = None
    """None: it still runs, or it was killed."""
    last_step: int | None = None
    how: SessionEnd | None = None
    message: str = ""
    """The error that ended it."""
    preset: str = ""
    """The preset that the command named; empty if it named none, as one that resumes a run."""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of Python and of packages."""


@contextmanager
def record_session(
    directory: Path,
    last_step: Callable[[], int],
    is_complete: Callable[[], bool],
    *,
    preset: str = "",
    device: str = "",
) -> Iterator[None]:
    """Record a session around the block. Its end is recorded also if an exception leaves the block.

    last_step: returns the last finished step. is_complete: returns whether no step remains.
    """
    start = {"at": time.time(), "began": last_step(), "process": os.getpid(), "host": socket.gethostname()}
    _append(directory, start | {"preset": preset, "device": device, "versions": _find_versions()})
    how: SessionEnd = "stopped"
    message = ""
    try:
        yield
        how = "done" if is_complete() else "stopped"
    except Exception as error:
        how = "failed"
        message = str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}"
        raise
    finally:
        end = {"at": time.time(), "ended": last_step(), "how": how, "message": mask_text(message)[:LONGEST]}
        _append(directory, end)


def read_sessions(directory: Path) -> list[Session]:
    """Return the sessions of a run, the first one first. A line that is damaged is skipped."""
    path = directory / SESSIONS
    if not path.is_file():
        return []
    sessions: list[Session] = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            if "began" in line:
                session = Session(
                    float(line["at"]),
                    int(line["began"]),
                    int(line["process"]),
                    str(line["host"]),
                    preset=str(line["preset"]),
                    device=str(line["device"]),
                    versions=dict(line["versions"].items()),
                )
                sessions.append(session)
            elif sessions and sessions[-1].how is None:
                end = {"ended_at": float(line["at"]), "last_step": int(line["ended"]), "how": line["how"]}
                sessions[-1] = replace(sessions[-1], **end, message=str(line["message"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return sessions


def describe_wait(directory: Path) -> str:
    """Return what to do about a run without a finished step: wait for it, or continue it if it failed or was stopped.

    A run that was killed has no recorded end, and counts as one that runs.
    """
    sessions = read_sessions(directory)
    last = sessions[-1] if sessions else None
    again = f"Give its command once more with `directory={directory}`."
    if last is not None and last.how == "failed":
        message = last.message if last.message.endswith((".", "!", "?")) else f"{last.message}."
        return f"It failed: {message} Correct the cause. {again}"
    if last is not None and last.how == "stopped":
        return f"It was stopped before that. {again}"
    return "Wait until it has."


def _find_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _append(directory: Path, line: dict[str, Any]) -> None:
    """Append a line. A failure, such as a full disk, is logged and stops nothing."""
    try:
        with (directory / SESSIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        get_logger("recipes").warning("The session could not be recorded in %s: %s.", directory / SESSIONS, error)
