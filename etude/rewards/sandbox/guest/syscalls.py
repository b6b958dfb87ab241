"""The Linux system calls by which a process gives up privileges: namespaces, mounts, capabilities, Landlock, seccomp.

Each function makes one request. It raises `OSError` if the kernel or its administrator refuses the request, and on any
other system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_MACHINE = os.uname().machine

USER = 0x10000000
NAMESPACES = {
    "network": 0x40000000,
    "processes": 0x20000000,
    "mounts": 0x00020000,
    "ipc": 0x08000000,
    "host": 0x04000000,
}
"""The flags of the namespaces, by the names used here."""

_RDONLY = 1
_NOSUID = 2
_NODEV = 4
_BIND = 0x1000
_REC = 0x4000
_PRIVATE = 0x40000
_DETACH = 2
_RECURSIVE = 0x8000
_AT_FDCWD = -100
_DEATH_SIGNAL = 1
_DUMPABLE = 4
_NO_NEW_PRIVILEGES = 38
_SUBREAPER = 36
_SECCOMP = 22


def _read_table(text: str) -> dict[str, tuple[int, ...]]:
    """Return the numbers of calls in a table: of each its name, its number on x86_64, and that on aarch64 or `-`."""
    words = text.split()
    rows = zip(words[::3], words[1::3], words[2::3], strict=True)
    return {name: tuple(int(number) for number in numbers if number != "-") for name, *numbers in rows}


_REFUSED_CALLS = _read_table(
    """
    socket 41 198               connect 42 203              bind 49 200                 listen 50 201
    ptrace 101 117              process_vm_readv 310 270    process_vm_writev 311 271   kcmp 312 272
    pidfd_getfd 438 438         process_madvise 440 440     process_mrelease 448 448    move_pages 279 239
    migrate_pages 256 238       mount 165 40                umount2 166 39              pivot_root 155 41
    mount_setattr 442 442       open_tree 428 428           open_tree_attr 467 467      move_mount 429 429
    fsopen 430 430              fsconfig 431 431            fsmount 432 432             fspick 433 433
    statmount 457 457           listmount 458 458           chroot 161 51               unshare 272 97
    setns 308 268               open_by_handle_at 304 265   bpf 321 280                 perf_event_open 298 241
    userfaultfd 323 282         fanotify_init 300 262       syslog 103 116              io_uring_setup 425 425
    io_uring_enter 426 426      io_uring_register 427 427   add_key 248 217             request_key 249 218
    keyctl 250 219              shmget 29 194               semget 64 190               msgget 68 186
    mq_open 240 180             setpriority 141 140         sched_setparam 142 118      sched_setscheduler 144 119
    sched_setaffinity 203 122   sched_setattr 314 274       ioprio_set 251 30           pidfd_send_signal 424 424
    memfd_create 319 279        memfd_secret 447 447
    """
)
"""Calls that reach a network, other processes' memory, more privileges, or memory that no limit counts."""
_SIGNALS = _read_table(
    """
    kill 62 129                tkill 200 130              tgkill 234 131             rt_sigqueueinfo 129 138
    rt_tgsigqueueinfo 297 240
    """
)
_LIMITS = _read_table("prlimit64 302 261")
"""Both are calls whose first argument names the process that they act on."""
_REFUSED_BY_ARGUMENT: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "fcntl": ((72, 25), (8, 10, 15)),
    "ioctl": ((16, 29), (0x8901, 0x8902, 0x5412)),
}
"""Calls that make a file send signals to a named process, or that type into a terminal.

Each with its numbers, and with the second arguments that do so.
"""
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKETPAIR = (53, 199)
_NEW_NAMESPACES = 0x7E020000
"""The flags of `clone` that create a namespace."""
_LOCAL = 1
_STREAM = 1
_KIND_OF_SOCKET = 0xF
_FILE_CALLS = _read_table(
    """
    chmod 90 -                fchmod 91 52              fchmodat 268 53           fchmodat2 452 452
    chown 92 -                lchown 94 -               fchown 93 55              fchownat 260 54
    utime 132 -               utimes 235 -              futimesat 261 -           utimensat 280 88
    setxattr 188 5            lsetxattr 189 6           fsetxattr 190 7           removexattr 197 14
    lremovexattr 198 15       fremovexattr 199 16       truncate 76 45            inotify_add_watch 254 27
    """
)
"""Calls that change or watch a file's metadata, which Landlock, or its first versions, allow for any file."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of each machine in the tables above, and the machine's number for seccomp."""


def unshare(flags: int) -> None:
    """Enter new namespaces of these kinds. A new process namespace holds from the next child on."""
    _call_libc("unshare", flags)


def become_subreaper() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_SUBREAPER, 1)


def make_undumpable() -> None:
    """Stop other processes of the same user from reading this process, its descriptors and its children's."""
    _prctl(_DUMPABLE, 0)


def set_no_new_privileges() -> None:
    """Stop programs that are started from here from gaining privileges."""
    _prctl(_NO_NEW_PRIVILEGES, 1)


def set_parent_death_signal() -> None:
    """Let the kernel kill this process when its parent ends."""
    _prctl(_DEATH_SIGNAL, 9)


def drop_capabilities() -> None:
    """Give up every capability of root, also within a namespace."""
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _call_libc("capset", header, none)


# -- mounts -----------------------------------------------------------------------------------------------------------


def make_mounts_private() -> None:
    """Hide all later mounts from other mount namespaces."""
    _call_libc("mount", None, b"/", None, _REC | _PRIVATE, None)


def mount_tmpfs(path: str, options: str) -> None:
    """Mount an empty in-memory file system."""
    _call_libc("mount", b"tmpfs", path.encode(), b"tmpfs", _NOSUID | _NODEV, options.encode())


def bind_mount(source: str, target: str) -> None:
    """Show a file or a directory, with the mounts below it, at a second path."""
    _call_libc("mount", source.encode(), target.encode(), None, _BIND | _REC, None)


def make_mounts_read_only(path: str) -> None:
    """Make a mount and all below it read-only."""
    attributes = struct.pack("=QQQQ", _RDONLY | _NOSUID, 0, 0, 0)
    _call_by_name("mount_setattr", _AT_FDCWD, path.encode(), _RECURSIVE, attributes, len(attributes))


def unmount(path: str) -> None:
    """Remove a mount with all mounts below it."""
    _call_libc("umount2", path.encode(), _DETACH)


def pivot_root(path: str) -> None:
    """Make a mount the root, and unmount the old root."""
    os.chdir(path)
    _call_by_name("pivot_root", b".", b".")
    _call_libc("umount2", b".", _DETACH)
    os.chdir("/")


# -- Landlock ---------------------------------------------------------------------------------------------------------

_LANDLOCK_CREATE = 444  # the same on every machine
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_DIRECTORY = 8
_TRUNCATE, _TALK_TO_DEVICE = 1 << 14, 1 << 15


def apply_landlock(readable: Sequence[str], devices: Sequence[str], writable: Sequence[str]) -> int:
    """Allow only these files, and forbid TCP and signals to processes outside, as far as this kernel can.

    Returns the version of Landlock: 1 and above restricts files, 4 and above TCP, 6 and above signals.
    """
    version = _call_by_number(_LANDLOCK_CREATE, None, 0, 1)
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    files = (1 << bits) - 1
    rules = struct.pack("=QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    ruleset = _call_by_number(_LANDLOCK_CREATE, rules, (8 if version < 4 else 16 if version < 6 else 24), 0)
    look = _EXECUTE | _READ_FILE | _READ_DIRECTORY
    use = (_READ_FILE | _WRITE_FILE | _TRUNCATE | _TALK_TO_DEVICE) & files
    try:
        for paths, rights in ((readable, look), (devices, use), (writable, files)):
            for path in paths:
                _allow(ruleset, path, rights)
        _call_by_number(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a path that does not exist needs no rule
    if not os.path.isdir(path):
        rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _TALK_TO_DEVICE
    try:
        _call_by_number(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


# -- seccomp ----------------------------------------------------------------------------------------------------------

_LOAD = 0x20
_AND = 0x54
_EQUALS = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOWED = 0x7FFF0000
_REFUSED = 0x00050000 | errno.EPERM
_UNKNOWN = 0x00050000 | errno.ENOSYS
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
_SECOND_ARGUMENT = 24
_OTHER_TABLE = 0x40000000
"""The first number of a second table of calls on x86_64, whose calls would bypass the filter."""


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


_ALLOW, _REFUSE = _instruction(_RETURN, _ALLOWED), _instruction(_RETURN, _REFUSED)


def install_seccomp_filter(*, has_pid_namespace: bool, has_own_root: bool) -> None:
    """Refuse the calls that reach a network, other processes or more privileges: permanently, and for all children.

    has_pid_namespace: no outside process is visible. Otherwise this process may send signals only to itself.
    has_own_root: no outside file is visible. Otherwise no call may change a file's owner, permissions or times.
    """
    column, architecture = _architecture()
    code = [_instruction(_LOAD, _ARCHITECTURE), _instruction(_EQUALS, architecture, 1, 0), _REFUSE]
    code += [_instruction(_LOAD, _NUMBER), _instruction(_AT_LEAST, _OTHER_TABLE, 0, 1), _REFUSE]
    for numbers in [*_REFUSED_CALLS.values(), *({} if has_own_root else _FILE_CALLS).values()]:
        if column < len(numbers):
            code += _match_call(numbers[column], _REFUSE)
    # A filter cannot read the flags of `clone3`, which are in memory. Without `clone3` the C library uses `clone`.
    code += _match_call(_CLONE3[column], _instruction(_RETURN, _UNKNOWN))
    code += _match_call(_CLONE[column], *_unless_any_bit(_NEW_NAMESPACES))
    code += _match_call(_SOCKETPAIR[column], *_only_local_streams())
    for numbers, refused in _REFUSED_BY_ARGUMENT.values():
        code += _match_call(numbers[column], *_unless_second(refused))
    for numbers in [*_LIMITS.values(), *({} if has_pid_namespace else _SIGNALS).values()]:
        code += _match_call(numbers[column], *_only_itself())
    code.append(_ALLOW)
    steps = ctypes.create_string_buffer(b"".join(code))
    program = struct.pack("@HP", len(code), ctypes.addressof(steps))
    _prctl(_SECCOMP, 2, program)


def _match_call(number: int, *steps: bytes) -> list[bytes]:
    """Return instructions for one call, the last of which allows or refuses it."""
    return [_instruction(_EQUALS, number, 0, len(steps)), *steps]


def _unless_any_bit(flags: int) -> list[bytes]:
    """Refuse a call with one of these flags in its first argument."""
    return [_instruction(_LOAD, _FIRST_ARGUMENT), _instruction(_ANY_BIT, flags, 0, 1), _REFUSE, _ALLOW]


def _unless_second(refused: Sequence[int]) -> list[bytes]:
    """Refuse a call with one of these values as its second argument."""
    tests = [_instruction(_EQUALS, value, len(refused) - index, 0) for index, value in enumerate(refused)]
    return [_instruction(_LOAD, _SECOND_ARGUMENT), *tests, _ALLOW, _REFUSE]


def _only_itself() -> list[bytes]:
    """Refuse a call on another process. This process is its own number or 0."""
    own = [_instruction(_EQUALS, 0, 2, 0), _instruction(_EQUALS, os.getpid(), 1, 0)]
    return [_instruction(_LOAD, _FIRST_ARGUMENT), *own, _REFUSE, _ALLOW]


def _only_local_streams() -> list[bytes]:
    """Refuse socket pairs other than local streams: an end of a datagram pair can send to any address."""
    local = [_instruction(_LOAD, _FIRST_ARGUMENT), _instruction(_EQUALS, _LOCAL, 0, 3)]
    stream = [
        _instruction(_LOAD, _SECOND_ARGUMENT),
        _instruction(_AND, _KIND_OF_SOCKET),
        _instruction(_EQUALS, _STREAM, 1, 0),
    ]
    return [*local, *stream, _REFUSE, _ALLOW]


# -- calling ----------------------------------------------------------------------------------------------------------


def _architecture() -> tuple[int, int]:
    if _LIBC is None or _MACHINE not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"not known on {sys.platform}, {_MACHINE}")
    return _ARCHITECTURES[_MACHINE]


def look_up_syscall_numbers(*names: str) -> dict[str, int]:
    """Return the numbers of calls on this machine; empty on an unknown machine."""
    if _LIBC is None or _MACHINE not in _ARCHITECTURES:
        return {}
    known = {**_REFUSED_CALLS, "clone": _CLONE}
    return {name: known[name][_architecture()[0]] for name in names}


def _call_libc(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library that returns -1 for a failure."""
    if _LIBC is None:
        raise OSError(errno.ENOSYS, f"{name} is not known on {sys.platform}")
    function = getattr(_LIBC, name)
    function.restype = ctypes.c_long
    converted = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result: int = function(*converted)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _prctl(option: int, *values: int | bytes) -> None:
    _call_libc("prctl", option, *[*values, 0, 0, 0, 0][:4])


def _call_by_name(name: str, *arguments: int | bytes | None) -> int:
    return _call_by_number(_REFUSED_CALLS[name][_architecture()[0]], *arguments)


def _call_by_number(number: int, *arguments: int | bytes | None) -> int:
    return _call_libc("syscall", number, *arguments)
