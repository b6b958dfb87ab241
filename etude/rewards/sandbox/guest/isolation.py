"""How far a process can be set apart from the rest of the machine, and how much it may use.

Nothing here fails where the kernel refuses: what is refused is done without, by the next best means, and in the end a
program tries it out (`etude.rewards.sandbox.probe.probe_protections`). In this order:

    namespaces    a network of its own without a device in it, processes of its own, a root of its own in memory
    a stranger    where an administrator runs this: a user that nobody else is, without rights
    Landlock      where the root is not its own: no other file, no TCP, no signal to others
    seccomp       no socket, no other process's memory, no mounts; where others are in sight, no signals to them
    limits        memory, CPU seconds, bytes written, processes: always
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from etude.rewards.sandbox.guest import syscalls as kernel

__all__ = ["Isolation", "SandboxSpec"]

NOBODY = 65534
FIRST_SANDBOX_UID = 0x70000000
"""From here on users are counted that are one box each, where there are so many."""
SANDBOX_PROCESSES = 3
"""Processes of a box beside the program's: warden, keeper, examiner."""
OPEN_FILES = 64
MAX_FILES = 4096
"""How many files a program may leave in its directory, where that is in memory."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = ("/lib", "/lib64", "/bin", "/usr/lib", "/usr/lib64", "/usr/bin", "/usr/share/zoneinfo", "/etc/ld.so.cache")
WORK = "/box"
"""The working directory, seen from within a root of its own."""


class SandboxSpec:
    """What a program may use."""

    def __init__(
        self,
        directory: str,
        memory: int,
        disk: int,
        processes: int,
        readable: Sequence[str] = (),
        without: Sequence[str] = (),
    ) -> None:
        """directory: an empty one of this box's own. memory: bytes of address space, for each process. disk: bytes of a
        file; of all, where the directory is in memory. processes: processes and threads at a time. readable:
        directories that may be read, beside Python's own and the system's libraries. without: means that are left out,
        as if the kernel had refused them: `namespaces`, `stranger`, `landlock`, `filter`.
        """
        self.directory, self.readable, self.without = directory, list(readable), list(without)
        self.memory, self.disk, self.processes = memory, disk, processes


class Isolation:
    """A process on its way out. The warden calls `leave`, the keeper `settle`, what the keeper starts `confine`."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.work = spec.directory
        self.user, self.group = os.geteuid(), os.getegid()
        self._was_root = self.user == 0
        self._granted: set[str] = set()
        self._other_threads = 0

    @property
    def has_pid_namespace(self) -> bool:
        """Whether it sees no process of others."""
        return "processes" in self._granted

    def enter_namespaces(self) -> None:
        """Go into namespaces of its own, as far as they are granted."""
        if "namespaces" not in self.spec.without:
            self._unshare()
        if self._was_root and "stranger" not in self.spec.without and self._is_python_readable():
            self.user = self.group = FIRST_SANDBOX_UID + os.getpid()
        with suppress(OSError):
            kernel.make_undumpable()

    def drop_privileges(self) -> None:
        """Take the root, and then every right that is left, away from the keeper."""
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
        """Bind this process to its limits and its directory, for good. cpu: seconds of a processor."""
        spec = self.spec
        if self.work != WORK and "landlock" not in spec.without:
            with suppress(OSError):
                kernel.apply_landlock([*_python_paths(), *SYSTEM, *spec.readable], DEVICES, [self.work])
        if "filter" not in spec.without:
            with suppress(OSError):
                kernel.install_seccomp_filter(has_pid_namespace=self.has_pid_namespace, has_own_root=self.work == WORK)
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
        """All at once, or those that are granted one by one. Who is no administrator becomes one of a namespace."""
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
        """A root in memory that shows Python, the system's libraries and a few devices, and has one place to write."""
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
        """Whether a user without rights can still load modules."""
        own_root = "mounts" in self._granted
        directories = filter(os.path.isdir, [*_python_paths(), *self.spec.readable])
        return all(_is_world_readable(directory, own_root=own_root) for directory in directories)

    def _has_own_process_limit(self) -> bool:
        """Whether the kernel counts the processes of this box apart from all others of its user."""
        return self.user >= FIRST_SANDBOX_UID or ("user" in self._granted and _kernel_version() >= (5, 14))

    def _is_mapped_uid(self, user: int) -> bool:
        try:
            with open("/proc/self/uid_map") as file:
                ranges = [tuple(map(int, line.split())) for line in file]
        except OSError:
            return user <= NOBODY
        return any(first <= user < first + count for first, _, count in ranges)


def _python_paths() -> list[str]:
    """Where Python and its own modules lie."""
    prefixes = dict.fromkeys((sys.base_prefix, sys.base_exec_prefix))
    paths = [f"{prefix}/{part}" for prefix in prefixes for part in ("lib", "lib64", "bin")]
    return [*paths, *(["/nix/store"] if sys.base_prefix.startswith("/nix/") else [])]


def _outermost(paths: Sequence[str]) -> Iterator[str]:
    """Of paths that are there, those that lie in no other."""
    existing = sorted({path for path in paths if os.path.lexists(path)})
    for path in existing:
        if not any(path.startswith(f"{other}/") for other in existing if not os.path.islink(other)):
            yield path


def _bind_into_root(path: str, root: str) -> None:
    """Make a path of the old root be there in the new one."""
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
    """Whether everybody may look into a directory; `alone`, whatever lies above it."""
    directories = [path]
    while not own_root and os.path.dirname(directories[-1]) != directories[-1]:
        directories.append(os.path.dirname(directories[-1]))
    return os.stat(path).st_mode & 0o5 == 0o5 and all(os.stat(directory).st_mode & 0o1 for directory in directories)


def _count_threads(user: int) -> int:
    """How many threads a user has on this machine, as far as can be seen; room for as many limits is left to them."""
    count = 0
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _kernel_version() -> tuple[int, ...]:
    """The version of the kernel."""
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit())


def _limit(resource_id: int, soft: int, hard: int) -> None:
    with suppress(OSError, ValueError):  # a system that does not know it, or a lower one that holds already
        resource.setrlimit(resource_id, (soft, hard))
