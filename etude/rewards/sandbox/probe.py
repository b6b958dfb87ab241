"""The probe of the sandbox's protections on this machine: it tries them out and consults no table.

A program attacks each protection, and its targets are checked from outside as well. A protection does not hold if one
attempt gets through.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from etude.errors import RewardError
from etude.rewards.sandbox.guest.syscalls import look_up_syscall_numbers
from etude.rewards.sandbox.sandbox import START_TIMEOUT_S, Sandbox, SandboxLimits, SandboxLostError

Protection = Literal["network", "files", "disk", "processes", "rights"]


class ProtectionText(NamedTuple):
    """The ends of two sentences about programs, for a protection that holds and for one that does not."""

    when_present: str
    when_missing: str


PROTECTIONS: Mapping[Protection, ProtectionText] = {
    "network": ProtectionText("reach no network and no socket of others", "reach the network or sockets of others"),
    "files": ProtectionText(
        "read and write no files but Python's and their own directory's", "read and write files as this user may"
    ),
    "disk": ProtectionText(
        "write no more than `disk_mb` in all", "write more than `disk_mb`, which bounds only each file"
    ),
    "processes": ProtectionText(
        "signal no other processes and multiply only to their limit",
        "signal or limit other processes of this user, or multiply without limit",
    ),
    "rights": ProtectionText(
        "gain no rights over namespaces, mounts and the kernel's other interfaces",
        "make namespaces or mounts of their own, or use kernel interfaces that bypass the sandbox",
    ),
}
"""The protections of a sandbox, by name."""

_LIMITS = SandboxLimits(disk_mb=2)
_SLACK = 64
"""The processes by which a program may exceed its limit, because other processes of the same user start and end."""


@cache
def probe_protections(without: Sequence[str] = ()) -> frozenset[Protection]:
    """Return the protections that hold. The result is cached. Raises `RewardError` if no program can run at all.

    without: means of protection that are left out (`Sandbox`).
    """
    with ThreadPoolExecutor(1) as pool:  # there may be an event loop in this thread
        return pool.submit(asyncio.run, _run_probe(tuple(without))).result()


async def _run_probe(without: Sequence[str]) -> frozenset[Protection]:
    with _open_targets() as targets:
        try:
            async with Sandbox(_PROBE, _LIMITS, without=without) as sandbox:
                result = await sandbox.run(json.dumps(targets.describe()), START_TIMEOUT_S)
        except SandboxLostError as error:
            raise RewardError(f"No program can run here: the sandbox could not start, because {error}.") from error
        try:
            broken = {*json.loads(result.output), *targets.find_broken()}
        except ValueError:
            raise RewardError(
                f"No program can run here: the probe's program ended with {result.status} {result.exit_code}."
            ) from None
    return frozenset(name for name in PROTECTIONS if name not in broken)


@dataclass(frozen=True)
class _Targets:
    """Targets outside the sandbox for a program to reach: a directory, listening sockets, a process."""

    directory: Path
    listeners: Mapping[str, socket.socket]
    bystander: subprocess.Popen[bytes]

    def describe(self) -> dict[str, object]:
        """Return the addresses of the targets, for the program."""
        return {
            "outside": str(self.directory),
            "addresses": {name: _text(listener.getsockname()) for name, listener in self.listeners.items()},
            "bystander": self.bystander.pid,
            "processes": _LIMITS.max_processes + _SLACK,
            "disk": _LIMITS.disk_mb << 20,
            "calls": look_up_syscall_numbers(
                "clone", "unshare", "fsopen", "open_tree", "io_uring_setup", "bpf", "ptrace", "keyctl"
            ),
        }

    def find_broken(self) -> set[str]:
        """Return the protections that do not hold, as far as the targets show it from outside."""
        broken = set()
        if any(map(_was_reached, self.listeners.values())):
            broken.add("network")
        if sorted(path.name for path in self.directory.iterdir() if not path.is_socket()) != ["secret"]:
            broken.add("files")
        if self.bystander.poll() is not None:
            broken.add("processes")
        return broken


def _text(address: object) -> object:
    """Return an address as a JSON value. The address of an abstract socket is bytes and begins with a zero."""
    return address.decode() if isinstance(address, bytes) else address


@contextmanager
def _open_targets() -> Iterator[_Targets]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="etude-outside-")))
        directory.chmod(0o777)
        (directory / "secret").write_text("seen")
        sleeper = [sys.executable, "-I", "-S", "-c", "input()"]
        bystander = stack.enter_context(subprocess.Popen(sleeper, stdin=subprocess.PIPE))
        stack.callback(bystander.kill)
        name = f"etude-probe-{os.getpid()}-{directory.name}"
        listeners = {}
        for key, family, kind, address in (
            ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            ("tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, f"\0{name}-stream"),
            ("abstract letters", socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{name}-letters"),
            ("file", socket.AF_UNIX, socket.SOCK_STREAM, f"{directory}/stream"),
            ("file letters", socket.AF_UNIX, socket.SOCK_DGRAM, f"{directory}/letters"),
        ):
            with suppress(OSError):  # a machine without this kind of socket has no such target
                listeners[key] = stack.enter_context(_open_listener(family, kind, address))
        yield _Targets(directory, listeners, bystander)


def _open_listener(family: int, kind: int, address: object) -> socket.socket:
    """Open a socket that accepts connections or datagrams."""
    listener = socket.socket(family, kind)
    try:
        listener.bind(address)  # type: ignore[arg-type]
        if kind == socket.SOCK_STREAM:
            listener.listen()
        listener.setblocking(False)
        path = listener.getsockname()
        if isinstance(path, str) and path.startswith("/"):
            Path(path).chmod(0o777)
    except OSError:
        listener.close()
        raise
    return listener


def _was_reached(listener: socket.socket) -> bool:
    """Return True if a connection or a datagram has reached a socket."""
    try:
        if listener.type == socket.SOCK_STREAM:
            listener.accept()[0].close()
        else:
            listener.recv(1)
    except OSError:
        return False
    return True


_PROBE = """
import ctypes, fcntl, json, os, resource, signal, socket, time
facts = json.loads(input())
outside, bystander, calls = facts["outside"], facts["bystander"], facts["calls"]
addresses = {name: tuple(at) if isinstance(at, list) else at for name, at in facts["addresses"].items()}
libc = ctypes.CDLL(None, use_errno=True)

def succeeds(attempt):
    try:
        attempt()
    except Exception:
        return False
    return True

def calling(name, *arguments):
    def call():
        result = libc.syscall(calls[name], *arguments)
        if name == "clone" and result == 0:
            os._exit(0)
        if result < 0:
            raise OSError(ctypes.get_errno())
    return call

def unshares():  # by the C library, where its number is not known
    if libc.unshare(0x10000000):
        raise OSError(ctypes.get_errno())

def connecting(name, family, kind=socket.SOCK_STREAM):
    def connects():
        with socket.socket(family, kind) as one:
            one.settimeout(2)
            one.connect(addresses[name])
            one.send(b"x")
    return connects

def pair(name, send):
    def sends():
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        send(one, addresses[name])
    return sends

def reconnected(one, address):
    one.connect(address)
    one.send(b"x")

def on_file(change, *more):
    return lambda: change(outside + "/secret", *more)

def follows():
    os.symlink(outside + "/secret", "seen")
    open("seen").close()

def fills():
    wrote = 0
    for n in range(8):
        with open("part-%d" % n, "wb") as file:
            wrote += file.write(bytes(facts["disk"] // 4))
    if wrote <= facts["disk"]:
        raise OSError("bounded")

def delegates():
    reads, writes = os.pipe()
    for command, value in ((8, bystander), (10, signal.SIGTERM), (fcntl.F_SETFL, os.O_ASYNC)):
        fcntl.fcntl(reads, command, value)
    os.write(writes, b"x")
    raise OSError("whether it came is seen from outside")

def multiplies():
    for _ in range(facts["processes"]):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)

letters = [pair(name, send) for name in ("abstract letters", "file letters") for send in (
    reconnected,
    lambda one, address: one.sendto(b"x", address),
    lambda one, address: one.sendmsg([b"x"], [], 0, address),
)]
attempts = {
    "network": [
        connecting("tcp", socket.AF_INET), connecting("tcp6", socket.AF_INET6),
        connecting("udp", socket.AF_INET, socket.SOCK_DGRAM),
        connecting("abstract", socket.AF_UNIX), connecting("file", socket.AF_UNIX),
        connecting("abstract letters", socket.AF_UNIX, socket.SOCK_DGRAM),
        connecting("file letters", socket.AF_UNIX, socket.SOCK_DGRAM), *letters],
    "files": [
        lambda: open(outside + "/secret").close(), lambda: open(outside + "/written", "w").close(),
        follows, lambda: os.listdir(outside), lambda: os.mkdir(outside + "/made"),
        on_file(os.utime), on_file(os.chmod, 0o666), on_file(os.truncate, 4), on_file(os.link, "linked"),
        on_file(os.rename, outside + "/renamed")],
    "disk": [fills],
    "rights": [
        calling("clone", 0x10020000 | signal.SIGCHLD, 0, 0, 0, 0), calling("unshare", 0x10000000), unshares,
        calling("fsopen", b"tmpfs", 0), calling("open_tree", -100, b"/", 1),
        calling("io_uring_setup", 1, bytes(120)), calling("bpf", 0, bytes(128), 128), calling("keyctl", 0, -3, 1)],
    "processes": [
        lambda: os.kill(bystander, signal.SIGTERM), delegates, calling("ptrace", 0x4206, bystander, 0, 0),
        lambda: resource.prlimit(bystander, resource.RLIMIT_NOFILE),
        lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE),
        lambda: os.setpriority(os.PRIO_PROCESS, bystander, 1), multiplies],
}
print(json.dumps([name for name, tries in attempts.items() if any([succeeds(attempt) for attempt in tries])]))
"""
