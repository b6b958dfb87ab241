"""The Ray cluster: a Ray that this process has joined already, the one that `RAY_ADDRESS` names, or a private one.

A private Ray runs on this machine. It has no dashboard, sends no usage reports, and accepts only its own processes, by
a token made for it. Its files are in a directory that is removed. It ends with this process: by `close`, or by the
system. On Linux the system ends its processes with the thread that started them. On other systems a process of Ray's
watches this one.

Ray gives a node half a minute to start, and then gives it up. On a busy machine that can be too little. Its processes
continue to start, and are joined once they are ready. Or they give each other up after a quarter of a minute, which no
option of Ray's makes longer, and are started again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, ClassVar

import ray

from etude.child_process import read_log_tail
from etude.config.env import generate_ray_token, ray_address
from etude.errors import CrewError
from etude.observe import get_logger

OBJECT_STORE_BYTES = 512 * 2**20
"""Bytes of a private Ray's object store; more goes to the disk."""
START_TIMEOUT = 600.0
"""Seconds that a private Ray may take to start."""
CONNECT_TIMEOUT = 10.0
"""Seconds that the Ray at `RAY_ADDRESS` may take to accept a connection."""
MAX_STARTS = 4
"""The number of starts of a Ray whose processes give each other up: each time more of their files is in memory."""
LONG_TIMEOUTS = {
    "agent_register_timeout_ms": int(1000 * START_TIMEOUT),
    "worker_register_timeout_seconds": int(START_TIMEOUT),
}
"""Limits of the waits of Ray's parts for each other. Ray's own half minutes are too short for a busy machine."""

ADDRESS_FLAG = "--gcs-address="
"""Ray's argument that gives a process the address of the others."""
DIRECTORY_PREFIX = "etude-ray-"
LONGEST_RELATIVE_PATH = "12345678/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
"""The prefix of a private Ray's directory, and the longest path below it.

Ray makes its own directory accessible to every user of the machine. The one around it lets no other user in.
"""
LOCK_FILE = "held"
"""A file in each directory, locked while its owner lives."""
MAX_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
"""The most bytes of a socket's path."""


class RayCluster:
    """Ray, joined by this process until this is closed."""

    _is_own: ClassVar[bool] = False
    """True if this process has joined a private Ray."""

    def __init__(self, cpus: int) -> None:
        """`cpus` is the least that a private Ray offers, however few the machine has."""
        self._directory: TemporaryDirectory[str] | None = None
        self._lock: BinaryIO | None = None
        self._is_connected = not ray.is_initialized()
        self._has_token = False
        self.logs = "the folder `logs` of its session"
        if self._is_connected and (address := ray_address()):
            self._join(address)
        elif self._is_connected:
            self._start(cpus)

    @property
    def is_own(self) -> bool:
        """True for a private Ray: its actors inherit the environment, and no other node ever joins it."""
        return RayCluster._is_own

    def close(self) -> None:
        """Leave Ray; a private one ends."""
        if self._is_connected:
            ray.shutdown()
        if self._has_token:
            _reload_tokens()
        if self._directory is not None:
            _kill_processes(self._directory.name)
            self._directory.cleanup()
            RayCluster._is_own = False
        if self._lock is not None:
            self._lock.close()
        self._is_connected = False
        self._has_token = False
        self._directory = None
        self._lock = None

    def _join(self, address: str) -> None:
        get_logger("dispatch").info("Joining the Ray at `RAY_ADDRESS` = %s.", address)
        try:
            _check_reachable(address)
            _init(address=address)
        except Exception as error:  # any error of Ray's
            ray.shutdown()
            raise CrewError(
                f"`RAY_ADDRESS` = {address} cannot be joined ({error}). Start a Ray there (`ray start --head`); "
                f"name the token that it demands, if it does (`RAY_AUTH_MODE=token`, `RAY_AUTH_TOKEN`); or unset "
                f"`RAY_ADDRESS` to have one on this machine."
            ) from error

    def _start(self, cpus: int) -> None:
        get_logger("dispatch").info("Starting Ray on this machine. `RAY_ADDRESS` would have joined another.")
        parent = _short_directory(tempfile.gettempdir())
        _remove_stale_directories(Path(parent))
        self._directory = TemporaryDirectory(prefix=DIRECTORY_PREFIX, dir=parent, ignore_cleanup_errors=True)
        self._lock = _lock_directory(Path(self._directory.name))
        directory = f"{self._directory.name}/r"
        self.logs = f"{directory}/session_latest/logs"
        try:
            with generate_ray_token() as self._has_token:
                if self._has_token:
                    _reload_tokens()
                self._begin(directory, cpus)
        except BaseException:
            self.close()
            raise

    def _begin(self, directory: str, cpus: int) -> None:
        own_options = {"address": "local", "num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
        own_options |= {"object_store_memory": OBJECT_STORE_BYTES, "_temp_dir": directory}
        own_options |= {"_system_config": LONG_TIMEOUTS}
        options = own_options
        starts = 1
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                _init(**options)
                RayCluster._is_own = True
                return
            except Exception as error:  # any error of Ray's
                ray.shutdown()
                address = _address(directory)
                starts += address is None
                if starts > MAX_STARTS or time.monotonic() > deadline:
                    log_tails = _log_tails(Path(self.logs))
                    raise CrewError(
                        f"Ray did not start on this machine ({error}).{log_tails} `cluster=local` does without it."
                    ) from error
                if address is None:
                    _kill_processes(directory)
                get_logger("dispatch").info("Ray is still starting.")
                options = {"address": address} if address else own_options


def _check_reachable(address: str) -> None:
    """Connect to the address once, if it is a host and a port. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()


def _short_directory(directory: str) -> str:
    """Return the directory in which to create a private Ray's: this one, or /tmp if sockets' paths would be too
    long."""
    longest = os.fsencode(f"{directory}/{DIRECTORY_PREFIX}{LONGEST_RELATIVE_PATH}")
    return directory if len(longest) <= MAX_SOCKET_PATH else "/tmp"


def _lock_directory(directory: Path) -> BinaryIO:
    """Lock a directory until the returned file is closed, or this process ends in any way."""
    draft = directory / f"{LOCK_FILE}.new"
    lock = draft.open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    draft.rename(directory / LOCK_FILE)  # so it is locked when it appears
    return lock


def _remove_stale_directories(parent: Path) -> None:
    """Remove the directories of controllers that were killed."""
    for lock in parent.glob(f"{DIRECTORY_PREFIX}*/{LOCK_FILE}"):
        with suppress(OSError), lock.open("rb") as file:  # it is in use, another user's, or deleted by now
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _reload_tokens() -> None:
    """Have Ray forget the token that it has read. By itself it would keep it as long as the process lives."""
    untyped: Any = ray
    untyped._raylet.Config.initialize("")
    untyped._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _init(**options: Any) -> None:
    """Join Ray, or start it.

    Ray takes the handler of SIGTERM, which is restored here. Ray's processes would print to standard output, so that is
    turned off. The important part of their output is in the errors.
    """
    untyped: Any = ray
    untyped._private.worker._worker_logs_enabled = False
    on_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if on_main_thread else None
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    finally:
        if on_main_thread:
            signal.signal(signal.SIGTERM, handler)


def _processes(directory: str) -> dict[int, list[str]]:
    """Return the processes that Ray started in this directory, with their arguments, if the system lists them."""
    processes = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if int(entry.name) != os.getpid() and any(directory in argument for argument in arguments):
                processes[int(entry.name)] = arguments
    return processes


def _address(directory: str) -> str | None:
    """Return the address of a Ray that is starting in this directory; None if there is none."""
    raylets = (arguments for arguments in _processes(directory).values() if arguments[0].endswith("raylet"))
    flags = (argument for arguments in raylets for argument in arguments if argument.startswith(ADDRESS_FLAG))
    return next((flag.partition("=")[2] for flag in flags), None)


def _kill_processes(directory: str) -> None:
    """Kill all processes that Ray started in this directory."""
    for pid in _processes(directory):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _log_tails(logs: Path) -> str:
    tails = [read_log_tail(log) for log in (logs / "gcs_server.out", logs / "raylet.out") if log.exists()]
    return "".join(f" {tail}" for tail in tails)
