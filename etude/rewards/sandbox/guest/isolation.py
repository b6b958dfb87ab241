"""The isolation of a process from the rest of the machine, and its resource limits.

A refusal of the kernel is not an error: isolation continues with the next best means. In the end a program tests the
result (`etude.rewards.sandbox.probe.probe_protections`). The means, in this order:

    namespaces    a separate network without devices, separate processes, a separate root in memory
    a stranger    if root runs this: a user id that no other process has, without privileges
    Landlock      without a separate root: no other file, no TCP, no signal to other processes
    seccomp       no socket, no other process's memory, no mounts; without separate processes, no signals to others
    limits        memory, CPU seconds, bytes written, processes: always
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from etude.rewards.sandbox.guest import syscalls as kernel

NOBODY = 65534
FIRST_SANDBOX_UID = 0x70000000
"""The first of the user ids that each belong to one sandbox, if the system has so many ids."""
SANDBOX_PROCESSES = 3
"""The processes of a sandbox besides the program's: outer process, init process, test runner."""
OPEN_FILES = 64
MAX_FILES = 4096
"""The most files in a program's directory, if the directory is in memory."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = ("/lib", "/lib64", "/bin", "/usr/lib", "/usr/lib64", "/usr/bin", "/usr/share/zoneinfo", "/etc/ld.so.cache")
WORK = "/box"
"""The working directory inside a separate root."""


class SandboxSpec(NamedTuple):
    """The isolation and the limits that a program gets."""

    directory: str
    """The sandbox's own empty directory."""
    memory: int
    """Bytes of address space of each process."""
    disk: int
    """Bytes of each file, or of all files if the directory is in memory."""
    processes: int
    """Processes and threads at a time."""
    readable: Sequence[str]
    """Readable directories besides those of Python and of the system's libraries."""
    without: Sequence[str]
    """Means that are left out, as if the kernel had refused them: `namespaces`, `stranger`, `landlock`, `filter`."""


class Isolation:
    """The steps of isolation. The outer process calls `enter_namespaces`, the init process `drop_privileges`, and each
    process that the init process starts calls `confine`."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.work = spec.directory
        self.user = os.geteuid()
        self.group = os.getegid()
        self._was_root = self.user == 0
        self._granted: set[str] = set()
        self._other_threads = 0

    def enter_namespaces(self) -> None:
        """Enter new namespaces, as far as the kernel grants them."""
        if "namespaces" not in self.spec.without:
            self._unshare()
        if self._was_root and "stranger" not in self.spec.without and self._is_python_readable():
            self.user = self.group = FIRST_SANDBOX_UID + os.getpid()
        with suppress(OSError):
            kernel.make_undumpable()

    def drop_privileges(self) -> None:
        """Change to a separate root if there is one, and drop all privileges of the init process."""
        if self._was_root and not self._is_mapped_uid(self.user):
            self.user = self.group = NOBODY
        if not self._has_own_process_limit():
            self._other_threads = _count_threads(self.user)
        if "mounts" in self._granted:
            try:
                self._mount_own_root()
                self.work = WORK
            except OSError:
                self._granted.discard("mounts")
                with suppress(OSError):
                    kernel.unmount(self.spec.directory)
        if self.work != WORK:
            os.chown(self.work, self.user, self.group)
            os.chdir(self.work)
        if self._was_root and self.user != 0:
            os.setgroups([])
            os.setresgid(self.group, self.group, self.group)
            os.setresuid(self.user, self.user, self.user)
        for step in (kernel.drop_capabilities, kernel.set_no_new_privileges, kernel.make_undumpable):
            with suppress(OSError):
                step()

    def confine(self, cpu: int) -> None:
        """Confine this process to its limits and its directory, permanently. cpu: processor seconds."""
        spec = self.spec
        if self.work != WORK and "landlock" not in spec.without:
            with suppress(OSError):
                kernel.apply_landlock([*_python_paths(), *SYSTEM, *spec.readable], DEVICES, [self.work])
        if "filter" not in spec.without:
            with suppress(OSError):
                has_pid_namespace = "processes" in self._granted
                kernel.install_seccomp_filter(has_pid_namespace=has_pid_namespace, has_own_root=self.work == WORK)
        for resource_id, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_AS, spec.memory),
            (resource.RLIMIT_FSIZE, spec.disk),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_NPROC, self._other_threads + spec.processes + SANDBOX_PROCESSES),
        ):
            _limit(resource_id, value, value)
        _limit(resource.RLIMIT_CPU, cpu, cpu + 1)

    # -- namespaces ---------------------------------------------------------------------------------------------------

    def _unshare(self) -> None:
        """Enter all namespaces at once, or those that are granted one by one. A user other than root also enters a user
        namespace, which it administers."""
        flags = kernel.NAMESPACES
        first = {} if self._was_root else {"user": kernel.USER}
        attempts = [{**first, **flags}, *([first] if first else []), *({name: flags[name]} for name in flags)]
        for attempt in attempts:
            try:
                kernel.unshare(sum(attempt.values()))
            except OSError:
                continue
            self._granted |= attempt.keys()
            if "user" in attempt:
                with suppress(OSError):
                    self._map_users()
            if "network" in attempt and "mounts" in attempt:
                break

    def _map_users(self) -> None:
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{self.user} {self.user} 1"),
            ("gid_map", f"{self.group} {self.group} 1"),
        ):
            descriptor = os.open(f"/proc/self/{file}", os.O_WRONLY)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)

    def _mount_own_root(self) -> None:
        """Mount a root in memory with Python, the system's libraries, a few devices and one writable directory."""
        root, spec = self.spec.directory, self.spec
        owner = f"uid={self.user},gid={self.group}"
        kernel.make_mounts_private()
        kernel.mount_tmpfs(root, "size=1m,mode=755")
        for path in _outermost([*_python_paths(), *SYSTEM, *DEVICES, *spec.readable]):
            _bind_into_root(path, root)
        os.mkdir(f"{root}{WORK}")
        if not os.path.lexists(f"{root}/tmp"):
            os.symlink(WORK, f"{root}/tmp")
        kernel.make_mounts_read_only(root)
        kernel.mount_tmpfs(f"{root}{WORK}", f"size={spec.disk},nr_inodes={MAX_FILES},mode=700,{owner}")
        kernel.pivot_root(root)
        os.chdir(WORK)

    # -- users --------------------------------------------------------------------------------------------------------

    def _is_python_readable(self) -> bool:
        """Return True if a user without privileges can still load Python's modules."""
        own_root = "mounts" in self._granted
        directories = filter(os.path.isdir, [*_python_paths(), *self.spec.readable])
        return all(_is_world_readable(directory, own_root=own_root) for directory in directories)

    def _has_own_process_limit(self) -> bool:
        """Return True if the kernel counts this sandbox's processes apart from all others of the same user."""
        return self.user >= FIRST_SANDBOX_UID or ("user" in self._granted and _kernel_version() >= (5, 14))

    def _is_mapped_uid(self, user: int) -> bool:
        try:
            with open("/proc/self/uid_map") as file:
                ranges = [tuple(map(int, line.split())) for line in file]
        except OSError:
            return user <= NOBODY
        return any(first <= user < first + count for first, _, count in ranges)


def _python_paths() -> list[str]:
    """Return the directories of Python and of its standard library."""
    prefixes = dict.fromkeys((sys.base_prefix, sys.base_exec_prefix))
    paths = [f"{prefix}/{part}" for prefix in prefixes for part in ("lib", "lib64", "bin")]
    return [*paths, *(["/nix/store"] if sys.base_prefix.startswith("/nix/") else [])]


def _outermost(paths: Sequence[str]) -> Iterator[str]:
    """Yield the paths that exist and are inside no other of them."""
    existing = sorted({path for path in paths if os.path.lexists(path)})
    for path in existing:
        if not any(path.startswith(f"{other}/") for other in existing if not os.path.islink(other)):
            yield path


def _bind_into_root(path: str, root: str) -> None:
    """Show a path of the old root in the new root."""
    target = root + path
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
        os.mkdir(target, 0o755)
        kernel.bind_mount(path, target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.bind_mount(path, target)


def _is_world_readable(path: str, *, own_root: bool) -> bool:
    """Return True if every user may read a directory. own_root: ignore the permissions of its parent directories."""
    directories = [path]
    while not own_root and os.path.dirname(directories[-1]) != directories[-1]:
        directories.append(os.path.dirname(directories[-1]))
    return os.stat(path).st_mode & 0o5 == 0o5 and all(os.stat(directory).st_mode & 0o1 for directory in directories)


def _count_threads(user: int) -> int:
    """Count the visible threads of a user on this machine. The process limit is raised by this number."""
    count = 0
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _kernel_version() -> tuple[int, ...]:
    """Return the major and minor version of the kernel."""
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit())


def _limit(resource_id: int, soft: int, hard: int) -> None:
    with suppress(OSError, ValueError):  # the system does not know this limit, or already has a lower one
        resource.setrlimit(resource_id, (soft, hard))
