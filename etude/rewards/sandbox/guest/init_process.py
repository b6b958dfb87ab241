"""The init process of a sandbox: it starts the program for each run, ends all its processes, and reports the result.

    parent ═pipe═ outer process ── init ─┬─ program        a script with its input, or functions that tests call
                                         └─ test runner    the expected output of a script, or the tests of functions

The outer process only waits. It stays outside the program's namespaces and reaps the processes that are left. The init
process is the first process inside the namespaces. It and its children have no privileges (`confine`).

The init process holds no secret. A test runner reads the expected results from the parent's pipe itself. So they are
never in the memory from which programs are forked. It writes its verdict, one letter for each test, to an unnamed file.
The init process creates that file after the program has started. So no program has a descriptor of it, or of the
parent's pipe. When the parent closes the pipe or dies, the init process ends all processes and itself.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from etude.rewards.sandbox.guest import syscalls as kernel
from etude.rewards.sandbox.guest.isolation import FIRST_SANDBOX_UID, Isolation, SandboxSpec
from etude.rewards.sandbox.guest.pipe_messages import receive, send
from etude.rewards.sandbox.guest.program_under_test import PROGRAM_FILE, run_script, serve
from etude.rewards.sandbox.guest.test_runner import MAX_REASON_BYTES, check_output, run_tests

IN, OUT = 0, 1
KILL_TIMEOUT_S = 2.0
"""Seconds that killing all processes of a program may take."""
UNLINKED_FILE = "etude-nameless"
FIRST_SPARE_FD = 100
"""The first descriptor number used to hold descriptors while those from 0 are assigned."""


def main() -> NoReturn:
    """Run the outer process. Its child is the init process, whose children run the program and the test runner."""
    sys.argv[:] = [PROGRAM_FILE]
    handlers = _ignore_signals()
    start = receive(IN)
    isolation = Isolation(SandboxSpec(**start["rules"]))
    with suppress(OSError):
        kernel.become_subreaper()
    isolation.enter_namespaces()
    child = os.fork()
    if child == 0:
        _run_init(isolation, start["code"], handlers)
    os.close(IN)
    os.close(OUT)
    os.waitpid(child, 0)
    _kill_and_reap(_descendants)
    os._exit(0)


def _ignore_signals() -> dict[int, Any]:
    """Ignore all signals, because a program can send them to the init process. Return the previous handlers."""
    handlers: dict[int, Any] = {}
    for number in signal.valid_signals() - {signal.SIGCHLD}:
        with suppress(OSError):  # a signal that cannot be ignored
            handlers[number] = signal.signal(number, signal.SIG_IGN)
    return handlers


def _run_init(isolation: Isolation, code: str, handlers: Mapping[int, Any]) -> NoReturn:
    with suppress(OSError):
        kernel.become_subreaper()
    isolation.drop_privileges()
    with suppress(OSError):
        kernel.set_parent_death_signal()  # after the change of user, which would clear it
    sys.path += isolation.spec.readable
    init = _SandboxInit(isolation, code, handlers)
    try:
        send(OUT, {})  # the sandbox is ready, and no code of the program has run
        while True:
            send(OUT, init.handle(receive(IN)))
    except EOFError:  # the parent has closed the pipe
        init.kill_all()
        os._exit(0)


class _SandboxInit:
    """Starts processes, one or two at a time, and waits for them."""

    def __init__(self, isolation: Isolation, code: str, handlers: Mapping[int, Any]) -> None:
        self._isolation = isolation
        self._code = code
        self._signal_handlers = handlers
        self._devnull = os.open(os.devnull, os.O_RDWR)
        self._program_pipes = -1, -1
        self._output_file = -1
        self._expected: Any = None
        """The expected results, which only the test runner's process holds."""
        self._children: list[int] = []
        self._wakeup_pipe, wakeup_write = os.pipe()
        for end in (self._wakeup_pipe, wakeup_write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        os.umask(0o077)

    def handle(self, request: Any) -> Any:
        """Perform a request and return the reply."""
        match request["do"]:
            case "run":
                return self._run(request["input"], request["seconds"], request["output"], request["cpu"])
            case "output":
                output = _read(self._output_file, os.fstat(self._output_file).st_size)
                return {"output": output.decode(errors="replace")}
            case "compare":
                return self._compare(request["seconds"], request["cpu"])
            case "load":
                return self._load(request["cpu"])
            case _:
                return self._run_tests(request["count"], request["seconds"], request["cpu"])

    def _run(self, text: str, seconds: float, max_output_bytes: int, cpu: int) -> Any:
        """Run the program as a script on this input, and keep at most `max_output_bytes` + 1 of its output."""
        input_file = _create_memory_file(text.encode(errors="replace"))
        if self._output_file >= 0:
            os.close(self._output_file)
        self._output_file = _create_memory_file()
        program = self._start(
            [input_file, self._output_file, self._devnull], lambda: run_script(self._restore_signals()), cpu
        )
        result = self._wait_for(program, seconds)
        self.kill_all()
        os.close(input_file)
        flood = {"ended": "flood"} if os.fstat(self._output_file).st_size > max_output_bytes else {}
        os.truncate(self._output_file, min(os.fstat(self._output_file).st_size, max_output_bytes + 1))
        return {**result, **flood}

    def _compare(self, seconds: float, cpu: int) -> Any:
        """Compare the output of the last run with the expected output, in a process that alone holds the latter."""
        return self._run_test_runner(
            [self._output_file], lambda expected: check_output(3, 4, expected), 1, seconds, cpu
        )

    def _load(self, cpu: int) -> Any:
        """Load the program in a process that will serve calls of its functions."""
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        standard_streams = [self._devnull] * 3
        self._start([*standard_streams, request_read, reply_write], lambda: serve(self._restore_signals(), 3, 4), cpu)
        os.close(request_read)
        os.close(reply_write)
        self._program_pipes = reply_read, request_write
        return {}

    def _run_tests(self, count: int, seconds: float, cpu: int) -> Any:
        """Test the loaded program from a process that holds the tests."""
        verdict = self._run_test_runner(
            self._program_pipes, lambda tests: run_tests(3, 4, 5, tests), count, seconds, cpu
        )
        for end in self._program_pipes:
            os.close(end)
        return verdict

    def _run_test_runner(
        self, descriptors: Sequence[int], work: Callable[[Any], int], count: int, seconds: float, cpu: int
    ) -> Any:
        """Start a process that reads the expected results from the parent, and return the letters that it writes."""
        result_file, devnull = _create_memory_file(), self._devnull
        ready_read, ready_write = os.pipe()
        test_runner = self._start(
            [devnull, devnull, devnull, *descriptors, result_file],
            lambda: work(self._expected),
            cpu,
            reads_expected=True,
        )
        os.close(ready_write)
        os.read(ready_read, 1)  # returns when the test runner has read its message and closed its descriptors
        os.close(ready_read)
        result = self._wait_for(test_runner, seconds)
        self.kill_all()
        letters = _read(result_file, count + MAX_REASON_BYTES)
        os.close(result_file)
        return {**result, "found": letters.decode("ascii", errors="replace")}

    def _start(
        self, descriptors: Sequence[int], work: Callable[[], int], cpu: int, *, reads_expected: bool = False
    ) -> int:
        """Start a child process with these descriptors, numbered from 0, and no others.

        The child's exit code is the result of `work`, or 1 if `work` raises. cpu: the child's processor seconds.
        reads_expected: True if the child first reads the expected results from the parent.
        """
        child = os.fork()
        if child:
            self._children.append(child)
            return child
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if reads_expected:
                self._expected = receive(IN)
            moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_SPARE_FD) for descriptor in descriptors]
            for number, descriptor in enumerate(moved):
                os.dup2(descriptor, number)
            os.closerange(len(moved), os.sysconf("SC_OPEN_MAX"))
            self._isolation.confine(cpu)
            code = work()
        finally:
            os._exit(code)

    def _restore_signals(self) -> str:
        """Restore the signal handlers from before `_ignore_signals`, and return the program's code."""
        for number, handler in self._signal_handlers.items():
            signal.signal(number, handler)
        return self._code

    def _wait_for(self, process: int, seconds: float) -> Any:
        """Wait for a process and return its status: an exit, a signal, or late."""
        began = time.monotonic()
        while True:
            elapsed = time.monotonic() - began
            while (reaped := _reap_child()) is not None:
                if reaped[0] == process:
                    code = os.waitstatus_to_exitcode(reaped[1])
                    return {"ended": "signal" if code < 0 else "exit", "code": code, "took": elapsed}
            if elapsed >= seconds:
                return {"ended": "late", "code": 0, "took": elapsed}
            ready, _, _ = select.select([self._wakeup_pipe, IN], [], [], seconds - elapsed)
            if IN in ready:
                raise EOFError  # the parent sends no request while a process runs, so it has closed the pipe
            if ready:
                os.read(self._wakeup_pipe, 4096)

    def kill_all(self) -> None:
        """Kill every process that the program has started, also those that left their session."""
        _kill_and_reap(self._kill_targets)
        self._children.clear()

    def _kill_targets(self) -> list[int]:
        """Return the targets of `kill`.

        -1, all processes that this one may signal, if only the sandbox's are among them. Otherwise its descendants, or
        without /proc the process groups that it started.
        """
        if os.getpid() == 1 or os.geteuid() >= FIRST_SANDBOX_UID:
            return [-1]
        return _descendants() if os.path.isdir("/proc/self") else [-process for process in self._children]


def _kill_and_reap(targets: Callable[[], list[int]]) -> None:
    """Kill and reap the targets until none is left. Orphans become children of this process, which reaps them too."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        for process in targets():
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _descendants() -> list[int]:
    """Return the descendants of this process. Orphans are its children, because it is their subreaper."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, ValueError), open(f"/proc/{name}/stat") as file:
                children.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    descendants = children.get(os.getpid(), [])
    for process in descendants:
        descendants += children.get(process, [])
    return descendants


def _reap_child() -> tuple[int, int] | None:
    """Reap a child that has ended and return its number and status, or None if none has ended."""
    try:
        process, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (process, status) if process else None


def _read(descriptor: int, count: int) -> bytes:
    """Read at most `count` bytes of a file, from its beginning."""
    parts = bytearray()
    while len(parts) < count and (part := os.pread(descriptor, count - len(parts), len(parts))):
        parts += part
    return bytes(parts)


def _create_memory_file(text: bytes = b"") -> int:
    """Create an unnamed file with this content."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("etude")
    else:
        descriptor = os.open(UNLINKED_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.unlink(UNLINKED_FILE)
    while text:
        text = text[os.write(descriptor, text) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
