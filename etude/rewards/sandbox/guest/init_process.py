"""Keeps one program: starts it, once for each run, ends all that it started, and tells what it said.

    parent ═pipe═ warden ── keeper ─┬─ program      a script with its input, or functions that are asked for
                                    └─ examiner     what a script should print, or the tests of those functions

The warden only waits, so that somebody outside the program's namespaces buries what is left. The keeper is the first
process within them. It and all that it starts have no rights (`confine`), and it holds nothing that is worth stealing:
an examiner reads from the parent's pipe itself what it is to expect, so that this never lies in the memory from which
programs are forked. An examiner writes its verdict, a letter for each test, to a file without a name that the keeper
made after the program was started: no program has a descriptor of it, or of the parent's pipe. When the parent closes
the pipe, or is gone, the keeper ends everything and itself.
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

__all__ = ["main"]

IN, OUT = 0, 1
KILL_TIMEOUT_S = 2.0
"""Seconds in which all that a program started must be gone."""
UNLINKED_FILE = "etude-nameless"
FIRST_SPARE_FD = 100
"""Descriptors are moved up here while those below are dealt out."""


class ParentClosedError(Exception):
    """The parent has closed the pipe."""


def main() -> NoReturn:
    """Be the warden of a program, and in a child its keeper, and in that one's children the program itself."""
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
    """Take no notice of signals: a program can send them to the keeper. Returns what was done about each before."""
    handlers: dict[int, Any] = {}
    for number in signal.valid_signals() - {signal.SIGCHLD}:
        with suppress(OSError):  # that of which notice must be taken
            handlers[number] = signal.signal(number, signal.SIG_IGN)
    return handlers


def _run_init(isolation: Isolation, code: str, handlers: Mapping[int, Any]) -> NoReturn:
    with suppress(OSError):
        kernel.become_subreaper()
    isolation.drop_privileges()
    with suppress(OSError):
        kernel.set_parent_death_signal()  # what went before would have undone it
    sys.path += isolation.spec.readable
    init = _SandboxInit(isolation, code, handlers)
    try:
        send(OUT, {})  # it is there, and nothing of the program has run
        while True:
            send(OUT, init.handle(init.receive_request()))
    except ParentClosedError:
        init.kill_all()
        os._exit(0)


class _SandboxInit:
    """Starts processes, one or two at a time, and waits for them."""

    def __init__(self, isolation: Isolation, code: str, handlers: Mapping[int, Any]) -> None:
        self._isolation, self._code, self._signal_handlers = isolation, code, handlers
        self._devnull = os.open(os.devnull, os.O_RDWR)
        self._program_pipes = -1, -1
        self._output_file = -1
        self._expected: Any = None
        """The expected results, which only the examiner's process holds."""
        self._children: list[int] = []
        self._wakeup_pipe, wakeup_write = os.pipe()
        for end in (self._wakeup_pipe, wakeup_write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        os.umask(0o077)

    def receive_request(self) -> Any:
        """What the parent asks for next."""
        try:
            return receive(IN)
        except EOFError:
            raise ParentClosedError from None

    def handle(self, request: Any) -> Any:
        """Do it."""
        match request["do"]:
            case "run":
                return self._run(request["input"], request["seconds"], request["output"], request["cpu"])
            case "output":
                return {"output": self._read_output().decode(errors="replace")}
            case "compare":
                return self._compare(request["seconds"], request["cpu"])
            case "load":
                return self._load(request["cpu"])
            case _:
                return self._run_tests(request["count"], request["seconds"], request["cpu"])

    def _run(self, text: str, seconds: float, max_output_bytes: int, cpu: int) -> Any:
        """Run the program as a script on this input, and keep so much of what it prints."""
        input_file = _create_memory_file(text.encode(errors="replace"))
        self._close_output()
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

    def _read_output(self) -> bytes:
        """The output of the last run."""
        return _read(self._output_file, os.fstat(self._output_file).st_size)

    def _close_output(self) -> None:
        if self._output_file >= 0:
            os.close(self._output_file)
            self._output_file = -1

    def _compare(self, seconds: float, cpu: int) -> Any:
        """Have what the last run printed compared with what it should have, by a process that alone knows that."""
        return self._run_test_runner(
            [self._output_file], lambda expected: check_output(3, 4, expected), 1, seconds, cpu
        )

    def _load(self, cpu: int) -> Any:
        """Have the program loaded by a process that will be asked for its functions."""
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        standard_streams = [self._devnull] * 3
        self._start([*standard_streams, request_read, reply_write], lambda: serve(self._restore_signals(), 3, 4), cpu)
        os.close(request_read)
        os.close(reply_write)
        self._program_pipes = reply_read, request_write
        return {}

    def _run_tests(self, count: int, seconds: float, cpu: int) -> Any:
        """Have the loaded program tried by a process that holds the tests."""
        verdict = self._run_test_runner(
            self._program_pipes, lambda tests: run_tests(3, 4, 5, tests), count, seconds, cpu
        )
        for end in self._program_pipes:
            os.close(end)
        return verdict

    def _run_test_runner(
        self, descriptors: Sequence[int], work: Callable[[Any], int], count: int, seconds: float, cpu: int
    ) -> Any:
        """Start a process that reads from the parent what it is to expect, and return the letters that it writes."""
        result_file, devnull = _create_memory_file(), self._devnull
        ready_read, ready_write = os.pipe()
        test_runner = self._start(
            [devnull, devnull, devnull, *descriptors, result_file],
            lambda: work(self._expected),
            cpu,
            reads_expected=True,
        )
        os.close(ready_write)
        os.read(
            ready_read, 1
        )  # it ends when the examiner has closed it, and the pipe to the parent is this process's again
        os.close(ready_read)
        result = self._wait_for(test_runner, seconds)
        self.kill_all()
        letters = _read(result_file, count + MAX_REASON_BYTES)
        os.close(result_file)
        return {**result, "found": letters.decode("ascii", errors="replace")}

    def _start(
        self, descriptors: Sequence[int], work: Callable[[], int], cpu: int, *, reads_expected: bool = False
    ) -> int:
        """Start a process that has these descriptors, counted from 0, and no others. What it does returns its exit
        code, and from whatever else it may do it does not come back. cpu: seconds of a processor that it may use up.
        asks: it first reads a message of the parent."""
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
        """The program's code, in a process that takes notice of signals again as any does."""
        for number, handler in self._signal_handlers.items():
            signal.signal(number, handler)
        return self._code

    def _wait_for(self, process: int, seconds: float) -> Any:
        """How a process ended: by itself, by a signal, or not in time."""
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
                raise ParentClosedError  # nothing is asked while something runs
            if ready:
                os.read(self._wakeup_pipe, 4096)

    def kill_all(self) -> None:
        """Kill every process that the program has started, wherever it went."""
        _kill_and_reap(self._kill_targets)
        self._children.clear()

    def _kill_targets(self) -> list[int]:
        """Whoever is to be killed: all that this process may signal but itself, where those are of its box alone; else
        its descendants; where no /proc tells those, the groups that it started."""
        if os.getpid() == 1 or os.geteuid() >= FIRST_SANDBOX_UID:
            return [-1]
        return _descendants() if os.path.isdir("/proc/self") else [-process for process in self._children]


def _kill_and_reap(targets: Callable[[], list[int]]) -> None:
    """Kill whoever can be reached until nobody is left, and bury them. Who loses a parent comes here for that."""
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
    """Whoever descends from this process: who lost their parent is its child, because it takes orphans."""
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
    """A child that has ended, with its status; None where none has."""
    try:
        process, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (process, status) if process else None


def _read(descriptor: int, count: int) -> bytes:
    """So much of a file, from its beginning."""
    parts = bytearray()
    while len(parts) < count and (part := os.pread(descriptor, count - len(parts), len(parts))):
        parts += part
    return bytes(parts)


def _create_memory_file(text: bytes = b"") -> int:
    """A file that has no name, with this in it."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("etude")
    else:
        descriptor = os.open(UNLINKED_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.unlink(UNLINKED_FILE)
    while text:
        text = text[os.write(descriptor, text) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
