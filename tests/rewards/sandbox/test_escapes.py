"""Attempts to escape from the sandbox, to stall the trainer, or to pass with a wrong program: none of them succeeds."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from etude.records import Outcome
from etude.rewards import Code, Judge, Verdict
from etude.rewards.sandbox.guest.syscalls import look_up_syscall_numbers
from etude.rewards.sandbox.probe import PROTECTIONS, probe_protections
from etude.rewards.sandbox.sandbox import Sandbox, SandboxBrokenError, SandboxLimits
from tests.rewards.sandbox.sandboxes import NAMED, WAYS, left, needs, run
from tests.rewards.tasks import task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the calls are Linux's")
ways = pytest.mark.parametrize("without", WAYS.values(), ids=WAYS)
known = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="its calls have other numbers")
CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *given):
    result = libc.syscall(number, *given)
    if result == 0 and number == CLONE:
        os._exit(0)
    return 0 if result >= 0 else ctypes.get_errno()
"""
EPERM, ENOSYS = 1, 38


def refusals(numbers: Sequence[tuple[Any, ...]], without: Sequence[str]) -> list[int]:
    """The error with which each call is refused; 0 for one that is not."""
    clone = look_up_syscall_numbers("clone")["clone"]
    code = f"CLONE = {clone}\n{CALLS}\nprint([call(*each) for each in {list(numbers)!r}])"
    errors: list[int] = json.loads(run(code, without=without).output)
    return errors


# -- rights -----------------------------------------------------------------------------------------------------------

NAMESPACES = {
    "mounts": 0x00020000,
    "groups": 0x02000000,
    "host": 0x04000000,
    "ipc": 0x08000000,
    "users": 0x10000000,
    "processes": 0x20000000,
    "network": 0x40000000,
    "users and mounts": 0x10020000,
}


@known
@ways
def test_no_namespace_is_made(without: Sequence[str]) -> None:
    needs("rights", without)
    clone, unshare = look_up_syscall_numbers("clone", "unshare").values()
    cloned = [(clone, flags | 17, 0, 0, 0, 0) for flags in NAMESPACES.values()]
    assert refusals(cloned, without) == [EPERM] * len(cloned)
    left = [(unshare, flags) for flags in (*NAMESPACES.values(), 0x80)]
    assert refusals(left, without) == [EPERM] * len(left)
    assert refusals([(435, bytes(88), 88)], without) == [ENOSYS], "its flags cannot be seen, so it is not there"


@known
@ways
def test_no_mount_is_made_by_any_of_the_ways_there_are(without: Sequence[str]) -> None:
    needs("rights", without)
    mount, umount, root, chroot = look_up_syscall_numbers("mount", "umount2", "pivot_root", "chroot").values()
    calls: list[tuple[Any, ...]] = [
        (430, b"tmpfs", 0),  # fsopen
        (431, 3, 6, 0, 0, 0),  # fsconfig
        (432, 3, 0, 0),  # fsmount
        (433, -100, b"/", 0),  # fspick
        (428, -100, b"/", 1),  # open_tree
        (429, 3, b"", -100, b"/", 4),  # move_mount
        (442, -100, b"/", 0, bytes(32), 32),  # mount_setattr
        (467, -100, b"/", 1, bytes(32), 32),  # open_tree_attr
        (mount, b"none", b".", b"tmpfs", 0, 0),
        (umount, b"/", 2),
        (root, b".", b"."),
        (chroot, b"."),
    ]
    assert refusals(calls, without) == [EPERM] * len(calls)


@known
@ways
def test_no_system_call_bypasses_the_sandbox(without: Sequence[str]) -> None:
    needs("rights", without)
    names = ("bpf", "keyctl", "add_key", "request_key", "perf_event_open", "userfaultfd", "setns", "ptrace", "syslog")
    more = ("io_uring_setup", "io_uring_enter", "io_uring_register", "fanotify_init", "open_by_handle_at", "kcmp")
    also = ("process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "shmget", "msgget", "semget")
    calls = [(number, 0, 0, 0, 0, 0) for number in look_up_syscall_numbers(*names, *more, *also).values()]
    assert refusals(calls, without) == [EPERM] * len(calls)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="it has one table of calls")
@ways
def test_system_calls_of_other_architectures_are_refused(without: Sequence[str]) -> None:
    needs("rights", without)
    assert refusals([(0x40000000 + 41, 2, 1, 0), (0x40000000 + 272, 0x10000000)], without) == [EPERM] * 2
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b8 67 01 00 00 cd 80 c3"))  # socket, as 32-bit programs call it
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    ended = run(code, without=without)
    assert ended.output == f"{-EPERM}\n" or ended.status == "signal"


def test_calls_that_programs_need_are_allowed() -> None:
    code = """
import socket, subprocess, threading
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    print(sum(pool.map(abs, [-1, -2])), subprocess.check_output(["/bin/echo", "child"]))
one, other = socket.socketpair()
one.sendall(b"pair")
print(other.recv(4))
import asyncio
print(asyncio.run(asyncio.sleep(0, "loop")))
"""
    assert run(code, max_processes=16).output == "3 b'child\\n'\nb'pair'\nloop\n"


# -- the network ------------------------------------------------------------------------------------------------------

PAIRS = """
import json, socket
def tried(attempt):
    try: attempt()
    except OSError: return 0
    return 1
def reconnects(kind, at):
    one = socket.socketpair(socket.AF_UNIX, kind)[0]
    one.connect(at)
    one.send(b"x")
def addresses(kind, at):
    socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"x", at)
def addresses_all(kind, at):
    socket.socketpair(socket.AF_UNIX, kind)[0].sendmsg([b"x"], [], 0, at)
def binds(kind, at):
    socket.socketpair(socket.AF_UNIX, kind)[0].bind(at + "-mine")
kinds = (socket.SOCK_DGRAM, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, socket.SOCK_SEQPACKET, socket.SOCK_STREAM)
ways = (reconnects, addresses, addresses_all, binds)
print(sum(tried(lambda: way(kind, at)) for way in ways for kind in kinds for at in ADDRESSES))
"""


@ways
def test_a_socket_pair_reaches_no_other_socket(without: Sequence[str]) -> None:
    needs("network", without)
    with (
        tempfile.TemporaryDirectory() as place,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as file,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
    ):
        Path(place).chmod(0o777)
        addresses = [f"{place}/letters", f"\0etude-test-{os.getpid()}-letters"]
        for listener, address in zip((file, abstract), addresses, strict=True):
            listener.bind(address)
            listener.setblocking(False)
        Path(addresses[0]).chmod(0o777)
        assert run(f"ADDRESSES = {addresses!r}\n{PAIRS}", without=without).output == "0\n"
        for listener in (file, abstract):
            with pytest.raises(BlockingIOError):
                listener.recv(1)


@pytest.mark.parametrize(
    ("without", "lacking"),
    [
        (("namespaces", "filter"), {"network", "disk", "rights", "processes"}),  # Landlock alone
        (("namespaces",), {"disk"}),
        (("filter",), {"rights", "processes"}),
        (("namespaces", "landlock", "filter", "stranger"), {*PROTECTIONS} - {"disk"}),
    ],
)
def test_missing_protections_are_reported(without: tuple[str, ...], lacking: set[str]) -> None:
    assert not probe_protections(without) & lacking


# -- the processes of the sandbox -------------------------------------------------------------------------------------

NEIGHBOURS = """
import os, resource, signal
def tried(attempt):
    try: attempt()
    except OSError: return 0
    return 1
LIMITS = [getattr(resource, name) for name in ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_AS", "RLIMIT_CPU")]
def spoils():
    done = 0
    for other in {os.getppid(), *range(1, 40)} - {os.getpid()}:
        done += sum(tried(lambda: resource.prlimit(other, which, (0, 0))) for which in LIMITS)
        done += tried(lambda: os.setpriority(os.PRIO_PROCESS, other, 19))
        done += tried(lambda: os.sched_setaffinity(other, {0}))
        done += tried(lambda: os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0)))
        tried(lambda: os.kill(other, signal.SIGSTOP))
    return done
"""


@ways
def test_a_program_harms_no_process_of_its_sandbox(without: Sequence[str]) -> None:
    needs("rights", without)

    async def twice() -> list[str]:
        async with Sandbox(f"{NEIGHBOURS}\nprint(spoils())", SandboxLimits(), without=without) as sandbox:
            return [(await sandbox.run("", 10.0)).output for _ in range(2)]

    assert asyncio.run(twice()) == ["0\n", "0\n"]


def test_a_program_that_is_called_does_not_lose_its_sandbox() -> None:
    tests = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]
    code = f"{NEIGHBOURS}\ndef add(a, b):\n    spoils()\n    return 0"
    verdict = judged(code, tests, total_timeout=2.0)
    assert (verdict.outcome, verdict.reward) == (Outcome.SUCCEEDED, 0.0)


@pytest.mark.parametrize(("times", "earned"), [(1, 1.0), (2, 0.0)])
def test_a_sandbox_that_ends_during_a_program_is_restarted_once(times: int, earned: float) -> None:
    """The machine or the program may end a sandbox: a program that ends two earns 0, and judging has not failed."""
    name = f"etude-ends-{times}"
    done = threading.Thread(target=_end_init_processes, args=(name, times))
    done.start()
    code = NAMED.format(name=name) + "import time; time.sleep(1); print(3)"
    verdict = judged(code, {"inputs": [""], "outputs": ["3"]})
    done.join()
    assert (verdict.outcome, verdict.reward) == (Outcome.SUCCEEDED, earned)


def _end_init_processes(name: str, times: int) -> None:
    """Kill the init process of a program, this many times."""
    for _ in range(times):
        while not (pids := left(name, within=0.0)):
            time.sleep(0.01)
        stat = Path(f"/proc/{pids[0]}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        left(name)


STEALS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def stolen():
    '''Descriptors of other processes.'''
    for process in range(1, 40):
        handle = libc.syscall(434, process, 0)
        for number in range(12):
            if handle >= 0 and (mine := libc.syscall(438, handle, number, 0)) >= 0:
                yield mine
def forged():
    for number in (*range(64), *stolen()):
        for letters in (b"1" * 8, b'{"found": "11"}', len(b'{"found": "11"}').to_bytes(4, "big") + b'{"found": "11"}'):
            try: os.write(number, letters)
            except OSError: pass
"""


def test_a_verdict_is_not_forged() -> None:
    code = f"{STEALS}\ndef add(a, b):\n    forged()\n    os._exit(0)"
    for truth in (["assert add(1, 2) == 3", "assert True or add"], {"fn_name": "add", "inputs": [[1]], "outputs": [3]}):
        verdict = judged(code, truth, score="share")
        assert (verdict.outcome, verdict.reward) == (Outcome.SUCCEEDED, 0.0)
    assert judged(f"{STEALS}\nforged()", {"inputs": [""], "outputs": ["11"]}).reward == 0.0


MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
held = "sesame-" + input()
def pages():
    '''The memory of this process, where Python and the C library keep what they made.'''
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    heap, made = libc.sbrk(0), id(held)
    for middle, around in ((heap, 8 << 20), (made, 24 << 20)):
        for page in range((middle - around) & ~4095, middle + around, 4096):
            if libc.write(writes, page, 4096) == 4096:
                yield os.read(reads, 4096)
found = sorted({part[:4] for page in pages() for part in page.split(b"sesame-")[1:] if part[:4].isdigit()})
print(found)
"""
"""A program that searches its own memory, for data of the process that it was forked from."""


def test_expected_outputs_are_not_left_in_memory() -> None:
    async def searched() -> str:
        async with Sandbox(MEMORY, SandboxLimits(cpu=20)) as sandbox:
            await sandbox.check_output("4711", "sesame-2357", 20.0)
            await sandbox.check_output("4711", "sesame-2357", 20.0)
            return (await sandbox.run("4711", 20.0)).output

    assert asyncio.run(searched()) == "[b'4711']\n", "what it made itself is found, and nothing else"


# -- values -----------------------------------------------------------------------------------------------------------

TRICKS = """
import decimal, fractions, sys
class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __hash__(self): return 3
    def __float__(self): return 3.0
    def __index__(self): return 3
    __int__ = __index__
class Raises:
    def __eq__(self, other): raise ValueError
    __hash__ = __repr__ = __str__ = __bool__ = __len__ = __iter__ = lambda self: 1 / 0
    def __getattr__(self, name): raise KeyboardInterrupt
class Number(int):
    def __eq__(self, other): return True
    def __int__(self): raise SystemExit
    __abs__ = __index__ = __int__
    __hash__ = int.__hash__
class Table(dict):
    def items(self): raise GeneratorExit
class Text(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
class Meta(type):
    def __eq__(cls, other): return True
    def __instancecheck__(cls, other): return True
    __hash__ = type.__hash__
class Shown(BaseException, metaclass=Meta):
    def __str__(self): raise Shown
    __repr__ = __str__
class Poses:
    __class__ = property(lambda self: int)
def deep(n):
    held = []
    for _ in range(n): held = [held]
    return held
def endless():
    while True: yield 3
def raising(kind):
    raise kind
"""
VALUES = {
    "a signalling NaN": "decimal.Decimal('sNaN')",
    "a NaN": "float('nan')",
    "a key of five thousand digits": "{10**5000: 1}",
    "an exponent without end": "decimal.Decimal('1E+999999999')",
    "many numbers": "list(range(300_000))",
    "two thousand keys of one hash": "{n * (2**61 - 1): 1 for n in range(1, 2_000)}",
    "a deep list": "deep(100_000)",
    "a list as deep as may be": "deep(63)",
    "a range without end": "range(10**18)",
    "a generator without end": "endless()",
    "bytes": "bytes(4_000_000)",
    "a liar": "Liar()",
    "a list of liars": "[Liar()]",
    "a value that raises": "Raises()",
    "a list of such": "[Raises()]",
    "a number that lies": "Number(4)",
    "a number that raises": "[Number(2**70)]",
    "a text that lies": "Text('4')",
    "a table that raises": "Table(a=1)",
    "a class": "Shown",
    "one that poses": "Poses()",
    "a fraction": "fractions.Fraction(10**4000 + 1, 10**4000)",
    "itself": "add",
    "nothing": "None",
    "stops an iteration": "raising(StopIteration)",
    "stops one that waits": "raising(StopAsyncIteration)",
    "ends a generator": "raising(GeneratorExit)",
    "exits": "raising(SystemExit)",
    "exits well": "raising(SystemExit(0))",
    "interrupts": "raising(KeyboardInterrupt)",
    "raises what no program has": "raising(Shown)",
    "raises one that cannot be shown": "raising(type('E', (Exception,), {'__str__': lambda self: 1 / 0}))",
    "raises a group": "raising(BaseExceptionGroup('g', [Shown()]))",
    "raises what wants more": "raising(UnicodeDecodeError('utf-8', b'', 0, 1, 'x'))",
    "recurses": "add(*sys.argv) if False else (lambda f: f(f))(lambda f: f(f))",
    "has no memory": "bytearray(1 << 40)",
    "fails its assertion": "raising(AssertionError)",
}

LARGE = {
    "ten million digits": "10**10_000_000",
    "three million numbers": "list(range(3_000_000))",
    "three million lists": "[[] for _ in range(3_000_000)]",
    "twenty thousand keys of one hash": "{n * (2**61 - 1): 1 for n in range(1, 20_000)}",
    "twenty thousand words of one hash": "{(n * (2**61 - 1),) for n in range(1, 20_000)}",
    "fifty million letters": "'x' * 50_000_000",
    "forty million bytes": "bytes(40_000_000)",
}


def judged(code: str, truth: Any, **options: Any) -> Verdict:
    """Return the verdict on a program, as in a run."""
    with Judge(Code(**options)) as judge:
        return asyncio.run(judge.judge(task(truth), f"```python\n{code}\n```"))


async def ticked(judge: Judge, truth: Any, answer: str) -> tuple[Verdict, float]:
    """Return the verdict, and the longest time for which it blocked the event loop."""
    longest, call = 0.0, asyncio.create_task(judge.judge(task(truth), answer))
    while not call.done():
        began = time.perf_counter()
        await asyncio.sleep(0.01)
        longest = max(longest, time.perf_counter() - began)
    return call.result(), longest


@pytest.mark.parametrize(
    "value",
    [
        *(pytest.param(value, id=name) for name, value in VALUES.items()),
        *(pytest.param(value, id=name, marks=pytest.mark.slow) for name, value in LARGE.items()),
    ],
)
def test_whatever_a_program_returns_lowers_its_own_score_and_nothing_else(value: str) -> None:
    """It passes the tests before and after, which do not use that value."""
    code = f"```python\n{TRICKS}\ndef add(a, b): return a + b if a != 1 else {value}\n```"
    calls = {"fn_name": "add", "inputs": [[0, 3], [1, 2]], "outputs": [3, 3]}
    statements = [
        "assert add(0, 3) == 3",
        "assert add(1, 2) == 3 and [add(1, 2)] == [3] and add(1, 2) in (3, 3.0) and str(add(1, 2)) == '3'",
        "assert {add(1, 2): 1} == {3: 1}",
        "assert all(each == 3 for each in map(lambda n: add(1, n), [2, 2]))",
    ]
    with Judge(Code(score="share", timeout=4.0, total_timeout=8.0)) as judge:
        for truth, share in ((calls, 1 / 2), (statements, 1 / 4)):
            verdict, longest = asyncio.run(ticked(judge, truth, code))
            assert (verdict.outcome, verdict.error) == (Outcome.SUCCEEDED, "") and verdict.reward == share
            assert longest < 1.0, f"it held up the event loop for {longest} s"


STOPS = [
    "assert all(map(add, [1, 1], [2, 2]))",
    "assert not any(map(add, [1], [2]))",
    "assert list(map(add, [1], [2])) == []",
    "assert sum(add(1, n) for n in [2]) == 0",
    "for each in map(add, [1], [2]):\n    assert each == 3",
    "assert [*zip(map(add, [1], [2]))] == []",
    "assert max(map(add, [1], [2]), default=3) == 3",
    "assert dict(map(lambda n: (n, add(1, n)), [2])) == {}",
    "assert next(map(add, [1], [2]), 3) == 3",
    "def each():\n    yield add(1, 2)\nassert list(each()) == []",
]


@pytest.mark.parametrize("kind", ["StopIteration", "StopAsyncIteration", "GeneratorExit"])
def test_an_exception_that_ends_a_loop_ends_no_test(kind: str) -> None:
    code = f"def add(a, b):\n    if a == 1: raise {kind}\n    return a + b"
    assert judged(code, [*STOPS, "assert add(0, 3) == 3"], score="share").reward == pytest.approx(1 / (len(STOPS) + 1))
    caught = (
        "def caught():\n    try:\n        add(1, 2)\n    except BaseException:\n        pass\n    assert True\ncaught()"
    )
    assert judged(code, caught).reward == 0.0


def test_an_expected_exception_passes_its_test() -> None:
    code = "import sys\ndef add(a, b):\n    if a == 1: sys.exit(2)\n    b'\\xff'.decode()"
    expected = "try:\n    add({})\nexcept {}:\n    pass\nelse:\n    assert False"
    tests = [expected.format("1, 2", "SystemExit"), expected.format("2, 2", "UnicodeDecodeError")]
    assert judged(code, tests).reward == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "print('3 ' * 300_000)",
        "print('3.0 ' * 200_000)",
        "print('\\n' * 500_000)",
        "print('9' * 900_000)",
        "import os; os.truncate(1, 60 << 20); print(3)",
        "import os, sys; os.write(1, bytes([0xff]) * 900_000)",
        "print(3); import os; os.dup2(0, 1); raise StopIteration",
        "print(3); raise GeneratorExit",
    ],
)
def test_no_output_of_a_script_stalls_the_event_loop(code: str) -> None:
    with Judge(Code()) as judge:
        for wanted in ("3.0", "3.0 " * 1000):
            verdict, longest = asyncio.run(ticked(judge, {"inputs": [""], "outputs": [wanted]}, code))
            assert (verdict.outcome, verdict.reward) == (Outcome.SUCCEEDED, 0.0) and longest < 1.0


def test_data_from_the_sandbox_is_bounded() -> None:
    """The trainer reads no more than the length of a verdict, even if the init process sends a longer message."""

    async def flooded() -> None:
        async with Sandbox("print(1)", SandboxLimits()) as sandbox:
            assert sandbox._process is not None and sandbox._process.stdin is not None
            sandbox._process.kill()
            await sandbox._process.wait()
            talks = "import sys; sys.stdout.buffer.write((1 << 24).to_bytes(4, 'big') + bytes(1 << 24))"
            pipe = subprocess.PIPE
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", talks, stdin=pipe, stdout=pipe)
            sandbox._process = process
            with pytest.raises(SandboxBrokenError, match=r"a message of 16777216 bytes"):
                await sandbox.check_output("", "1", 5.0)
            process.kill()

    asyncio.run(flooded())
