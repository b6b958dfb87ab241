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

from etude.rewards.inside import kernel
from etude.rewards.inside.candidate import FILE, run_script, serve
from etude.rewards.inside.confine import STRANGERS, Apart, Rules
from etude.rewards.inside.examiner import LONGEST, examine, examine_output
from etude.rewards.inside.frames import receive, send

__all__ = ["main"]

IN, OUT = 0, 1
ENDING = 2.0
"""Seconds in which all that a program started must be gone."""
NAMELESS = "etude-nameless"
HIGH = 100
"""Descriptors are moved up here while those below are dealt out."""


class ClosedError(Exception):
    """The parent has closed the pipe."""


def main() -> NoReturn:
    """Be the warden of a program, and in a child its keeper, and in that one's children the program itself."""
    sys.argv[:] = [FILE]
    usual = _deaf()
    start = receive(IN)
    apart = Apart(Rules(**start["rules"]))
    with suppress(OSError):
        kernel.take_orphans()
    apart.leave()
    child = os.fork()
    if child == 0:
        _keep(apart, start["code"], usual)
    os.close(IN)
    os.close(OUT)
    os.waitpid(child, 0)
    _end(_descendants)
    os._exit(0)


def _deaf() -> dict[int, Any]:
    """Take no notice of signals: a program can send them to the keeper. Returns what was done about each before."""
    usual: dict[int, Any] = {}
    for number in signal.valid_signals() - {signal.SIGCHLD}:
        with suppress(OSError):  # that of which notice must be taken
            usual[number] = signal.signal(number, signal.SIG_IGN)
    return usual


def _keep(apart: Apart, code: str, usual: Mapping[int, Any]) -> NoReturn:
    with suppress(OSError):
        kernel.take_orphans()
    apart.settle()
    with suppress(OSError):
        kernel.die_with_parent()  # what went before would have undone it
    sys.path += apart.rules.readable
    keeper = _Keeper(apart, code, usual)
    try:
        send(OUT, {})  # it is there, and nothing of the program has run
        while True:
            send(OUT, keeper.do(keeper.next()))
    except ClosedError:
        keeper.end_all()
        os._exit(0)


class _Keeper:
    """Starts processes, one or two at a time, and waits for them."""

    def __init__(self, apart: Apart, code: str, usual: Mapping[int, Any]) -> None:
        self._apart, self._code, self._usual = apart, code, usual
        self._nothing = os.open(os.devnull, os.O_RDWR)
        self._line = -1, -1
        self._said = -1
        self._expected: Any = None
        """The expected results, which only the examiner's process holds."""
        self._started: list[int] = []
        self._woken, wakes = os.pipe()
        for end in (self._woken, wakes):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        os.umask(0o077)

    def next(self) -> Any:
        """What the parent asks for next."""
        try:
            return receive(IN)
        except EOFError:
            raise ClosedError from None

    def do(self, request: Any) -> Any:
        """Do it."""
        match request["do"]:
            case "run":
                return self._run(request["input"], request["seconds"], request["output"], request["cpu"])
            case "output":
                return {"output": self._output().decode(errors="replace")}
            case "compare":
                return self._compare(request["seconds"], request["cpu"])
            case "load":
                return self._load(request["cpu"])
            case _:
                return self._examine(request["count"], request["seconds"], request["cpu"])

    def _run(self, text: str, seconds: float, most: int, cpu: int) -> Any:
        """Run the program as a script on this input, and keep so much of what it prints."""
        given = _memory(text.encode(errors="replace"))
        self._forget_output()
        self._said = _memory()
        program = self._start([given, self._said, self._nothing], lambda: run_script(self._heeding()), cpu)
        ended = self._await(program, seconds)
        self.end_all()
        os.close(given)
        flood = {"ended": "flood"} if os.fstat(self._said).st_size > most else {}
        os.truncate(self._said, min(os.fstat(self._said).st_size, most + 1))
        return {**ended, **flood}

    def _output(self) -> bytes:
        """The output of the last run."""
        return _read(self._said, os.fstat(self._said).st_size)

    def _forget_output(self) -> None:
        if self._said >= 0:
            os.close(self._said)
            self._said = -1

    def _compare(self, seconds: float, cpu: int) -> Any:
        """Have what the last run printed compared with what it should have, by a process that alone knows that."""
        return self._verdict([self._said], lambda wanted: examine_output(3, 4, wanted), 1, seconds, cpu)

    def _load(self, cpu: int) -> Any:
        """Have the program loaded by a process that will be asked for its functions."""
        asked, asks = os.pipe()
        told, tells = os.pipe()
        nothing = [self._nothing] * 3
        self._start([*nothing, asked, tells], lambda: serve(self._heeding(), 3, 4), cpu)
        os.close(asked)
        os.close(tells)
        self._line = told, asks
        return {}

    def _examine(self, count: int, seconds: float, cpu: int) -> Any:
        """Have the loaded program tried by a process that holds the tests."""
        verdict = self._verdict(self._line, lambda tests: examine(3, 4, 5, tests), count, seconds, cpu)
        for end in self._line:
            os.close(end)
        return verdict

    def _verdict(
        self, descriptors: Sequence[int], work: Callable[[Any], int], count: int, seconds: float, cpu: int
    ) -> Any:
        """Start a process that reads from the parent what it is to expect, and return the letters that it writes."""
        found, nothing = _memory(), self._nothing
        known, knows = os.pipe()
        examiner = self._start(
            [nothing, nothing, nothing, *descriptors, found], lambda: work(self._expected), cpu, asks=True
        )
        os.close(knows)
        os.read(known, 1)  # it ends when the examiner has closed it, and the pipe to the parent is this process's again
        os.close(known)
        ended = self._await(examiner, seconds)
        self.end_all()
        letters = _read(found, count + LONGEST)
        os.close(found)
        return {**ended, "found": letters.decode("ascii", errors="replace")}

    def _start(self, descriptors: Sequence[int], work: Callable[[], int], cpu: int, *, asks: bool = False) -> int:
        """Start a process that has these descriptors, counted from 0, and no others. What it does returns its exit
        code, and from whatever else it may do it does not come back. cpu: seconds of a processor that it may use up.
        asks: it first reads a message of the parent."""
        child = os.fork()
        if child:
            self._started.append(child)
            return child
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if asks:
                self._expected = receive(IN)
            moved = [fcntl.fcntl(each, fcntl.F_DUPFD, HIGH) for each in descriptors]
            for place, each in enumerate(moved):
                os.dup2(each, place)
            os.closerange(len(moved), os.sysconf("SC_OPEN_MAX"))
            self._apart.confine(cpu)
            code = work()
        finally:
            os._exit(code)

    def _heeding(self) -> str:
        """The program's code, in a process that takes notice of signals again as any does."""
        for number, done in self._usual.items():
            signal.signal(number, done)
        return self._code

    def _await(self, process: int, seconds: float) -> Any:
        """How a process ended: by itself, by a signal, or not in time."""
        began = time.monotonic()
        while True:
            passed = time.monotonic() - began
            while (ended := _buried()) is not None:
                if ended[0] == process:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return {"ended": "signal" if code < 0 else "exit", "code": code, "took": passed}
            if passed >= seconds:
                return {"ended": "late", "code": 0, "took": passed}
            ready, _, _ = select.select([self._woken, IN], [], [], seconds - passed)
            if IN in ready:
                raise ClosedError  # nothing is asked while something runs
            if ready:
                os.read(self._woken, 4096)

    def end_all(self) -> None:
        """Kill every process that the program has started, wherever it went."""
        _end(self._reached)
        self._started.clear()

    def _reached(self) -> list[int]:
        """Whoever is to be killed: all that this process may signal but itself, where those are of its box alone; else
        its descendants; where no /proc tells those, the groups that it started."""
        if os.getpid() == 1 or os.geteuid() >= STRANGERS:
            return [-1]
        return _descendants() if os.path.isdir("/proc/self") else [-process for process in self._started]


def _end(reached: Callable[[], list[int]]) -> None:
    """Kill whoever can be reached until nobody is left, and bury them. Who loses a parent comes here for that."""
    until = time.monotonic() + ENDING
    while time.monotonic() < until:
        for process in reached():
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
    found = children.get(os.getpid(), [])
    for process in found:
        found += children.get(process, [])
    return found


def _buried() -> tuple[int, int] | None:
    """A child that has ended, with its status; None where none has."""
    try:
        process, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (process, status) if process else None


def _read(descriptor: int, most: int) -> bytes:
    """So much of a file, from its beginning."""
    parts = bytearray()
    while len(parts) < most and (part := os.pread(descriptor, most - len(parts), len(parts))):
        parts += part
    return bytes(parts)


def _memory(text: bytes = b"") -> int:
    """A file that has no name, with this in it."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("etude")
    else:
        descriptor = os.open(NAMELESS, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.unlink(NAMELESS)
    while text:
        text = text[os.write(descriptor, text) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
