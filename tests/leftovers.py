"""Find what a test leaves behind for later ones: a process group, a thread of Etude, or a child process.

After every test, the default process group is looked for, and destroyed, and new threads and children are noted. They
may belong to a fixture of the file, so they may run until the file's last test in this process is over; then an error
names the test that began each. What a fixture of the session starts may stay, and so may what a test of such a server
starts. A quick test pays some microseconds.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

SHARED_SERVERS = frozenset({"a_ray", "vllm_server", "sglang_server"})
"""Fixtures of the session whose processes and threads begin and end while tests use them."""

PERMANENT = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "compile_worker",  # of torch, as the next
    "torch_shm_manager",
    "wandb-core",
    "etude/child_process.py",  # the reaper
    "pgserver/pginstall/bin/postgres",  # the database of the session
)
"""Parts of the commands of children that libraries and the reaper keep until the process ends."""

UNENDING = ("etude-group", "etude-aside", "etude-rendering")
"""The beginnings of the names of threads that may go on: torch waits in the first until a group's timeout. The others
wait for work, until their executor is collected, which a failure that is kept may refer to."""

PATIENCE_S = 5.0
"""Seconds in which threads and children may still end."""


class Leftovers:
    """The pytest plug-in that fails the teardown of a test that leaves a process group, or of a file's last test if one
    of them left a thread or a child."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._seen_threads: set[threading.Thread] = set()
        self._seen_pids: set[int] = set()
        self._began: dict[threading.Thread | int, str] = {}
        """The threads and the children that began in this file, and in which test."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, object, object]:
        """Let what a fixture of the session starts stay."""
        if fixturedef.scope not in ("session", "package"):
            return (yield)
        self._note(request.node.nodeid)
        try:
            return (yield)
        finally:
            self._note(None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
        yield
        uses_shared = not SHARED_SERVERS.isdisjoint(getattr(item, "fixturenames", ()))
        self._note(None if uses_shared else item.nodeid)
        errors = [f"{item.nodeid} leaves the default process group."] if destroyed_process_group() else []
        if nextitem is None or nextitem.path != item.path:
            errors += self._left_by_the_file()
        if errors:
            pytest.fail("\n".join(errors), pytrace=False)

    def _note(self, test: str | None) -> None:
        """Note the threads and children that are new, and the test that began them; None lets them stay."""
        threads = {
            thread
            for thread in threading.enumerate()
            if thread.name.startswith("etude") and not thread.name.startswith(UNENDING)
        }
        new: list[threading.Thread | int] = [*(threads - self._seen_threads), *self._new_children()]
        self._seen_threads = threads
        if test is not None:
            self._began |= dict.fromkeys(new, test)

    def _new_children(self) -> Iterator[int]:
        if not has_children():
            return
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 (a listing of names is quick)
        for pid in pids - self._seen_pids:
            if is_running_child(pid) and not any(part in command_of(pid) for part in PERMANENT):
                yield pid
        self._seen_pids = pids

    def _left_by_the_file(self) -> list[str]:
        """Return a line for each thread and child of the file that does not end."""
        if any(is_running(each) for each in self._began):
            gc.collect()  # which ends the threads of an executor that nothing refers to
        until = time.monotonic() + self._patience_s
        while (left := [each for each in self._began if is_running(each)]) and time.monotonic() < until:
            time.sleep(0.02)
        lines = [f"{self._began[each]} leaves {description_of(each)}." for each in left]
        self._began.clear()
        return lines


def destroyed_process_group() -> bool:
    """Destroy torch's default process group if there is one; return whether there was."""
    distributed = sys.modules.get("torch.distributed")  # there is no group if nothing has loaded torch
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    distributed.destroy_process_group()
    return True


def has_children() -> bool:
    """Return whether this process has children, and the system shows them. This takes a microsecond."""
    if sys.platform != "linux":
        return False
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def is_running(each: threading.Thread | int) -> bool:
    """Return whether a thread or a child still runs."""
    return each.is_alive() if isinstance(each, threading.Thread) else is_running_child(each)


def is_running_child(pid: int) -> bool:
    """Return whether a process is a child of this one and has not ended."""
    with suppress(OSError):
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(parent) == os.getpid() and state != "Z"
    return False


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def description_of(each: threading.Thread | int) -> str:
    """Return the name of a thread, or the command of a process."""
    if isinstance(each, threading.Thread):
        return f"the thread {each.name!r}"
    return f"the process {each} ({command_of(each)[:200]})"
