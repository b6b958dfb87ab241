"""Checks of the machine: cores and their load, memory, disk, and the limits of a process."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import shutil
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from etude.config.env import cache_directory
from etude.tools.doctor.finding import GIB, Finding, fail, ok, warn

BYTES_A_PARAMETER, CHECKPOINT_BYTES = 18, 12
"""Bytes per parameter: memory for training in bf16, and disk space of a checkpoint."""
LITTLE_MEMORY, TOO_LITTLE_MEMORY = 4 * GIB, GIB
LITTLE_DISK, TOO_LITTLE_DISK = 10 * GIB, GIB
SLOW_DISK = 50e6
LITTLE_SHARED = GIB
FILES = 1024
BUSY_LOAD = 1.5
"""The load per core above which a machine is busy."""
CHUNK_BYTES = 4 * 2**20
MAX_WRITTEN_BYTES = 64 * 2**20
MAX_SECONDS = 0.5
"""The disk speed test: bytes of a write, most bytes in all, and most seconds."""
SKEW = 5.0
TIMEOUT_S = 1.0
"""Seconds for a name lookup or a connection on this machine."""
AGAIN = "Run `etude doctor` again when fewer programs run."
KILLING_LIMITS = (
    (resource.RLIMIT_AS, "v", "bytes of memory"),
    (resource.RLIMIT_FSIZE, "f", "bytes in a file"),
    (resource.RLIMIT_CPU, "t", "seconds of the processor"),
)
"""Limits that kill a process, their `ulimit` letters, and their units."""
MEMORY_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
USED_FILES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def memory() -> Iterator[Finding]:
    """Check the memory."""
    yield grade_memory(*read_memory())


def read_memory() -> tuple[int, int]:
    """Return the total and the free memory of this process in bytes, within its cgroup limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in meminfo else total
    limit = min((number for path in MEMORY_FILES if (number := _number(path)) is not None), default=None)
    if limit is not None and limit < total:
        used = min((number for path in USED_FILES if (number := _number(path)) is not None), default=0)
        total, free = limit, min(free, limit - used)
    return total, free


def grade_memory(total: int, free: int) -> Finding:
    """Grade an amount of memory."""
    size = free / BYTES_A_PARAMETER
    room = f"{size / 1e9:.1f} billion" if size >= 1e9 else f"{size / 1e6:.0f} million"
    what = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}: room to train up to {room} parameters in bf16"
    remedy = "Stop other programs, give the container more, or train a smaller model with shorter answers."
    if free < TOO_LITTLE_MEMORY:
        return fail("memory", f"{what}.", remedy)
    return warn("memory", f"{what}.", remedy) if free < LITTLE_MEMORY else ok("memory", what)


def cores() -> int:
    """Return the number of cores for this process, by its CPU affinity and its cgroup quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = (_text("/sys/fs/cgroup/cpu.max").split() or ["max", "1"])[:2]
    if quota == "max":
        quota = str(_number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") or 0)
        period = str(_number("/sys/fs/cgroup/cpu/cpu.cfs_period_us") or 1)
    quota_cores = int(quota) / int(period)
    return min(affinity, math.ceil(quota_cores)) if quota_cores > 0 else affinity


def load() -> Iterator[Finding]:
    """Check if other programs use the cores."""
    if busy := describe_busy():
        yield warn("load", busy, "Timeouts and speeds that are reported here are those of a busy machine.")
    else:
        yield ok("load", f"{os.getloadavg()[0]:.1f} on {cores()} cores, over the last minute")


def describe_busy() -> str:
    """Return a sentence if the machine has more work than cores, so that a timeout may have no other cause."""
    recent, available = os.getloadavg()[0], cores()
    if recent <= BUSY_LOAD * available:
        return ""
    return f"The machine is busy: its load was {recent:.1f} on {available} cores, over the last minute."


def place(directory: Path) -> Iterator[Finding]:
    """Check if a directory supports a run: creating, renaming and locking files, and a journal."""
    remedy = "Start runs in a writable directory, or give them `directory=…` on a local disk."
    try:
        with TemporaryDirectory(prefix=".etude-doctor-", dir=directory) as temporary:
            draft = Path(temporary, "draft")
            draft.write_text("written")
            draft = draft.rename(Path(temporary, "whole"))
            with draft.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            skew = draft.stat().st_mtime - time.time()
            with closing(sqlite3.connect(Path(temporary, "journal.sqlite"), timeout=TIMEOUT_S)) as journal:
                mode = journal.execute("PRAGMA journal_mode=WAL").fetchone()[0]
                journal.execute("CREATE TABLE held (entry INTEGER)")
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        yield fail("place", f"No run can be written to {directory}: {reason}.", remedy)
        return
    if mode != "wal":
        yield fail(
            "place", f"{directory} does not support a journal: it has no shared memory for SQLite ({mode}).", remedy
        )
    elif abs(skew) > SKEW:
        what = f"Files in {directory} are dated {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the clock."
        yield warn("place", what, "Synchronize the clocks of this machine and of its file server.")
    else:
        yield ok("place", f"runs can be written to {directory}")


def disk(directory: Path) -> Iterator[Finding]:
    """Check the free disk space, and the speed of writing a checkpoint."""
    yield grade_space(directory, shutil.disk_usage(directory).free)
    try:
        with TemporaryDirectory(prefix=".etude-doctor-", dir=directory) as temporary:
            yield grade_speed(_speed(Path(temporary, "file")))
    except OSError:
        return  # `place` reports a directory that is not writable


def grade_space(directory: Path, free: int) -> Finding:
    """Grade an amount of free disk space."""
    what = f"{free / GIB:.1f} GiB free in {directory}; a checkpoint takes 12 bytes for each parameter"
    remedy = "Free disk space, or give runs `directory=…` on another disk; `checkpoint.keep=1` keeps fewer."
    if free < TOO_LITTLE_DISK:
        return fail("disk", f"{what}.", remedy)
    return warn("disk", f"{what}.", remedy) if free < LITTLE_DISK else ok("disk", what)


def grade_speed(rate: float) -> Finding:
    """Grade a disk speed in bytes per second."""
    what = f"{rate / 1e6:,.0f} MB/s to disk: {CHECKPOINT_BYTES * 1e9 / rate:,.0f} s for each billion parameters saved"
    if rate < SLOW_DISK:
        return warn("disk speed", f"{what}.", "Write runs to a local disk, or save less often: `checkpoint.every`.")
    return ok("disk speed", what)


def cache() -> Iterator[Finding]:
    """Check if the cache directory is writable."""
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=directory):
            pass
    except OSError as error:
        what = f"{directory} cannot be written: {error.strerror or error}."
        yield warn(
            "cache", what, "Set XDG_CACHE_HOME to a writable directory; without a cache, files are rebuilt each time."
        )
    else:
        yield ok("cache", f"{directory} can be written")


def shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Check the shared memory, through which the processes of a run exchange tensors."""
    if not sys.platform.startswith("linux"):
        return
    if not path.is_dir():
        yield warn("shared memory", f"There is no {path}.", "Runs of several processes need it: mount a tmpfs there.")
        return
    size = shutil.disk_usage(path).total
    what = f"{size / GIB:.2f} GiB in {path}"
    if size < LITTLE_SHARED:
        remedy = "Start the container with more: `docker run --shm-size=8g`. Runs of several processes need it."
        yield warn("shared memory", f"{what}.", remedy)
    else:
        yield ok("shared memory", what)


def limits() -> Iterator[Finding]:
    """Check the resource limits of a process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = []
    if files != resource.RLIM_INFINITY and files < FILES:
        what = f"A process may open {files} files."
        findings.append(warn("limits", what, f"Run `ulimit -n {FILES}` or more before a run."))
    for kind, letter, what in KILLING_LIMITS:
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            message = f"The system kills a process that takes more than {limit:,} {what}."
            findings.append(warn("limits", message, f"Run `ulimit -{letter} unlimited` before a run."))
    yield from findings
    if not findings:
        number = "any number of" if files == resource.RLIM_INFINITY else f"{files:,}"
        yield ok("limits", f"{number} open files per process; no limit of memory, file size or CPU time")


def clock() -> Iterator[Finding]:
    """Check the clock: the names of runs and their timeouts depend on it."""
    behind = Path(__file__).stat().st_mtime - time.time()
    if behind > 24 * 3600:
        what = f"The clock shows {time.strftime('%Y-%m-%d')}, which is before Etude was installed."
        yield warn("clock", what, "Set it, for example with `timedatectl set-ntp true`.")
    else:
        yield ok("clock", time.strftime("%Y-%m-%d %H:%M:%S"))


def loopback() -> Iterator[Finding]:
    """Check that processes of this machine can connect to each other, and resolve its name."""
    try:
        with closing(socket.create_server(("127.0.0.1", 0))) as listening:
            listening.settimeout(TIMEOUT_S)
            with closing(socket.create_connection(listening.getsockname(), TIMEOUT_S)):
                listening.accept()[0].close()
    except OSError as error:
        if isinstance(error, TimeoutError) and (busy := describe_busy()):
            yield warn("loopback", f"No connection to 127.0.0.1 within {TIMEOUT_S:.0f} s. {busy}", AGAIN)
            return
        remedy = "Servers and runs of several processes need it: `ip link set lo up`, or allow it in the sandbox."
        yield fail("loopback", f"No process can be reached at 127.0.0.1: {error.strerror or error}.", remedy)
        return
    name = socket.gethostname()
    for host in ("localhost", name):
        if not _resolves(host):
            remedy = f"Runs of several processes need it: add the line `127.0.0.1 {host}` to /etc/hosts."
            busy = describe_busy()
            what = f"The name {host} does not resolve within {TIMEOUT_S:.0f} s.{busy and f' {busy}'}"
            yield warn("loopback", what, f"{AGAIN} If it stays: {remedy}" if busy else remedy)
            return
    yield ok("loopback", f"processes reach each other at 127.0.0.1, and {name} resolves")


def compiler() -> Iterator[Finding]:
    """Check for a C++ compiler, which torch.compile needs."""
    path = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if path is None:
        remedy = "Only compiled models need one: `apt install g++`, or the package of your system."
        yield warn("compiler", "There is no C++ compiler on the PATH.", remedy)
    else:
        yield ok("compiler", path)


def _speed(file: Path) -> float:
    chunk, sync = os.urandom(CHUNK_BYTES), getattr(os, "fdatasync", os.fsync)
    start, written = time.perf_counter(), 0
    with file.open("wb", buffering=0) as output:
        while written < MAX_WRITTEN_BYTES and time.perf_counter() - start < MAX_SECONDS:
            written += output.write(chunk)
            sync(output.fileno())
    return written / (time.perf_counter() - start)


def _resolves(host: str) -> bool:
    addresses: list[object] = []

    def look() -> None:
        with suppress(OSError):
            addresses.extend(socket.getaddrinfo(host, None))

    # A lookup has no timeout. A slow one stays on its thread, and ends with this process.
    thread = Thread(target=look, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return bool(addresses)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(path: str) -> int | None:
    """Read a number from a system file; return None for no number, or for the word for no limit."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
