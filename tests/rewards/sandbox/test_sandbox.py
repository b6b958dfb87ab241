"""The sandbox: the rights of a program in it, and the attacks that it may try."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from etude.errors import RewardError
from etude.rewards.sandbox import probe
from etude.rewards.sandbox import sandbox as sandbox_module
from etude.rewards.sandbox.probe import PROTECTIONS, probe_protections
from etude.rewards.sandbox.sandbox import Sandbox, SandboxLimits, SandboxLostError
from tests.rewards.sandbox.sandboxes import NAMED, WAYS, left, needs, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up as Linux shows them")
ways = pytest.mark.parametrize(
    "without",
    [pytest.param(without, id=way, marks=[pytest.mark.slow] if without else []) for way, without in WAYS.items()],
)


@pytest.fixture
def open_to_all() -> Iterator[str]:
    """A directory that every user may read, in memory if possible, because a disk is slow."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        Path(directory).chmod(0o755)
        yield directory


# -- rights of programs -----------------------------------------------------------------------------------------------


DOES = {
    "print(sum(map(int, input().split())))": "7\n",
    "import sys\nfor line in sys.stdin: print(line.strip()[::-1])": "ba\ndc\n",
    "print('é', chr(0x1F600))": "é 😀\n",
    "if __name__ == '__main__':\n    print('main')": "main\n",
    "import os; print(os.getcwd() != '', os.listdir('.'))": "True []\n",
    "open('a', 'w').write('x'); print(open('a').read())": "x\n",
    "import tempfile; tempfile.NamedTemporaryFile().close(); print('ok')": "ok\n",
    "import subprocess; print(subprocess.run(['/bin/echo', 'hi'], capture_output=True).stdout)": "b'hi\\n'\n",
    "import heapq, bisect, math, itertools, decimal; print(math.pi > 3)": "True\n",
    "import sys; print(sys.argv, __file__)": "['answer.py'] answer.py\n",
    "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\nprint(A())": "A(x=1)\n",
    "import threading; one = threading.Thread(target=lambda: print('thread')); one.start(); one.join()": "thread\n",
}
"""Statements of a program, with their output."""


def test_a_program_runs_as_a_script_does() -> None:
    result = run("\n".join(DOES), "3 4\nab\ncd")
    assert (
        result.output == "".join(DOES.values())
        and result.is_success
        and (result.status, result.exit_code) == ("exit", 0)
    )


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        ("import sys; sys.exit(3)", "", 3),
        ("import sys; sys.exit('no')", "", 1),
        ("exit()", "", 0),
        ("import os; print('now', flush=True); os._exit(0)", "now\n", 0),
        ("print(1)\n1 / 0", "1\n", 1),
        ("def f(:", "", 1),
        (
            "import atexit, threading; atexit.register(print, 'last'); print('first')\n"
            "threading.Thread(target=lambda: print('thread')).start()",
            "first\nthread\nlast\n",
            0,
        ),
        ("out = open(1, 'w'); out.write('not flushed')", "not flushed", 0),
    ],
)
def test_a_program_ends_as_a_script_does(code: str, output: str, status: int) -> None:
    result = run(code)
    assert (result.status, result.exit_code, result.output) == ("exit", status, output) and result.is_success == (
        status == 0
    )


def test_a_program_runs_without_namespaces_too() -> None:
    result = run("open('a', 'w').write(input()); print(open('a').read())", "x", without=WAYS["without namespaces"])
    assert result.is_success and result.output == "x\n"


def test_runs_follow_each_other_and_begin_afresh() -> None:
    async def twice() -> list[str]:
        async with Sandbox("try: n += 1\nexcept NameError: n = int(input())\nprint(n)", SandboxLimits()) as sandbox:
            return [(await sandbox.run(text, 5.0)).output for text in ("1", "2", "3")]

    assert asyncio.run(twice()) == ["1\n", "2\n", "3\n"]


def test_many_sandboxes_are_open_side_by_side() -> None:
    async def one(n: int) -> str:
        async with Sandbox("import time; time.sleep(0.5); print(input())", SandboxLimits()) as sandbox:
            return (await sandbox.run(str(n), 20.0)).output

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one(n) for n in range(8)))

    assert asyncio.run(all_of_them()) == [f"{n}\n" for n in range(8)]


def test_packages_are_available_if_the_option_allows_them() -> None:
    code = "import numpy; print(int(numpy.arange(4).sum()))"
    assert run(code).exit_code == 1
    assert run(code, packages=True, memory_mb=2048).output == "6\n"


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@ways
def test_a_loop_is_ended_by_its_processor_seconds(without: Sequence[str]) -> None:
    result = run("while True: pass", seconds=30.0, without=without, cpu=1)
    assert result.status == "signal" and result.exit_code == -signal.SIGXCPU


@pytest.mark.slow
def test_a_loop_that_ignores_the_warning_is_ended_too() -> None:
    code = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(code, seconds=30.0, cpu=1).exit_code == -signal.SIGKILL


@ways
def test_waiting_is_ended_by_the_clock(without: Sequence[str]) -> None:
    result = run("print('began', flush=True)\nimport time; time.sleep(60)", seconds=0.5, without=without)
    assert result.status == "late" and 0.4 < result.seconds < 5 and result.output == "began\n"


@ways
def test_memory_is_bounded(without: Sequence[str]) -> None:
    code = "held = []\ntry:\n    while True: held.append(bytearray(1 << 24))\nexcept MemoryError: print(len(held) < 32)"
    assert run(code, without=without, memory_mb=256).output == "True\n"


@ways
def test_what_is_written_is_bounded(without: Sequence[str]) -> None:
    code = """
import os
try:
    with open("large", "wb") as file:
        for _ in range(64): file.write(bytes(1 << 20))
except OSError: pass
print(os.path.getsize("large") <= 4 << 20)
"""
    assert run(code, without=without, disk_mb=4).output == "True\n"


def test_the_total_of_written_files_is_bounded_in_memory() -> None:
    needs("files")
    code = """
wrote = 0
try:
    for n in range(64):
        with open(str(n), "wb") as file: file.write(bytes(1 << 20))
        wrote += 1
except OSError: pass
print(wrote)
"""
    if int(run(code, disk_mb=4).output) == 64:
        pytest.skip("this machine grants no root in memory")
    assert int(run(code, disk_mb=4).output) <= 4


@ways
def test_output_without_end_is_a_flood(without: Sequence[str]) -> None:
    result = run("while True: print('x' * 4096)", seconds=20.0, without=without, output_kb=64, disk_mb=4)
    assert result.status == "flood" and not result.is_success and len(result.output) == (64 << 10) + 1
    letters = run(f"print(chr(0xE9) * {40 << 10})", without=without, output_kb=64)
    assert letters.status == "flood", "bytes count, and not letters"


# -- escapes ----------------------------------------------------------------------------------------------------------


@ways
def test_a_fork_bomb_stays_small_and_is_gone(without: Sequence[str]) -> None:
    needs("processes", without)
    bomb = NAMED.format(name="etude-bomb") + "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    result = run(bomb, seconds=0.5, without=without, cpu=2)
    assert result.status != "exit" and left("etude-bomb") == []


@ways
def test_a_daemon_does_not_outlive_its_run(without: Sequence[str]) -> None:
    daemon = (
        NAMED.format(name="etude-daemon")
        + """
import os, signal, sys, time
for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(each, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(0.2)
print("left")
"""
    )
    result = run(daemon, without=without)
    assert result.output == "left\n" and left("etude-daemon") == []


@ways
def test_a_program_that_kills_all_it_can_hits_no_other_process(without: Sequence[str]) -> None:
    needs("processes", without)
    code = """
import os, signal
for process in (os.getppid(), 1, -1, -os.getppid(), *range(2, 400)):
    if process != os.getpid():
        try: os.kill(process, signal.SIGKILL)
        except OSError: pass
print("still here")
"""
    code = code.replace("range(2, 400)", f"range(2, 400), {os.getpid()}")
    result = run(code, without=without)
    assert result.output == "still here\n"


@ways
def test_a_program_cannot_end_its_init_process_by_a_signal(without: Sequence[str]) -> None:
    code = """
import os, signal, time
usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM) == 0
for number in signal.valid_signals():
    try: os.kill(os.getppid(), number)
    except OSError: pass
time.sleep(0.2)
print(*usual)
"""
    needs("network", without)
    assert run(code, without=without).output == "True True\n"


@ways
def test_no_file_sends_signals_to_other_processes(without: Sequence[str]) -> None:
    needs("network", without)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        code = f"""
import fcntl, os, signal, socket, struct
def tried(attempt):
    try: attempt()
    except OSError: return 0
    return 1
reads, writes = os.pipe()
one, other = socket.socketpair()
owner = struct.pack("i", {bystander.pid})
asked = [lambda: fcntl.fcntl(reads, 8, {bystander.pid}), lambda: fcntl.fcntl(reads, 10, signal.SIGKILL),
         lambda: fcntl.fcntl(reads, 15, struct.pack("ii", 1, {bystander.pid})),
         lambda: fcntl.ioctl(one, 0x8901, owner), lambda: fcntl.ioctl(one, 0x8902, owner)]
print(*map(tried, asked), tried(lambda: fcntl.fcntl(reads, fcntl.F_GETFL)))
for each in (reads, one): fcntl.fcntl(each, fcntl.F_SETFL, fcntl.fcntl(each, fcntl.F_GETFL) | os.O_ASYNC)
os.write(writes, b"x")
other.send(b"x")
"""
        assert run(code, without=without).output == "0 0 0 0 0 1\n"
        assert bystander.poll() is None
        bystander.kill()


@ways
def test_no_memory_escapes_the_limits(without: Sequence[str]) -> None:
    needs("network", without)
    code = """
import ctypes, os
try: os.memfd_create("much")
except OSError: print("refused", ctypes.CDLL(None).syscall(447, 0))
"""
    assert run(code, without=without).output == "refused -1\n"


@ways
def test_no_network_is_reached(without: Sequence[str]) -> None:
    needs("network", without)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as local,
    ):
        udp.bind(("127.0.0.1", 0))
        local.bind("\0etude-test-abstract-" + str(os.getpid()))
        local.listen()
        code = f"""
import socket
def tried(attempt):
    try: attempt()
    except OSError: return 0
    return 1
def tcp(): socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), timeout=2)
def udp(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"hello", ("127.0.0.1", {udp.getsockname()[1]}))
def local(): socket.socket(socket.AF_UNIX).connect({local.getsockname()!r})
def outside(): socket.create_connection(("198.51.100.1", 80), timeout=2)
print([tried(each) for each in (tcp, udp, local, outside)])
"""
        assert run(code, without=without).output == "[0, 0, 0, 0]\n"
        udp.setblocking(False)
        with pytest.raises(BlockingIOError):
            udp.recv(10)


@ways
def test_no_file_outside_is_read_or_written(without: Sequence[str]) -> None:
    needs("files", without)
    with tempfile.TemporaryDirectory() as outside:
        Path(outside).chmod(0o777)
        (Path(outside) / "secret").write_text("seen")
        code = f"""
import os
def tried(attempt):
    try: return attempt()
    except OSError: return 0
places = [{outside!r} + "/secret", {str(Path(__file__))!r}, "/etc/passwd", "/proc/1/environ", "/proc/self/environ"]
print([tried(lambda: len(open(place).read())) for place in places])
new = [{outside!r} + "/new", "/tmp/../new", "/usr/lib/new", "/new"]
print([tried(lambda: open(place, "w") and 1) for place in new])
print([tried(lambda: os.listdir(place) and 1) for place in ({outside!r}, "/home", "/proc", "/sys")])
changes = [lambda: os.chmod(places[0], 0), lambda: os.utime(places[0]), lambda: os.unlink(places[0])]
print(*[tried(lambda: change() or 1) for change in changes])
"""
        output = run(code, without=without).output
        assert output == "[0, 0, 0, 0, 0]\n[0, 0, 0, 0]\n[0, 0, 0, 0]\n0 0 0\n"
        assert (Path(outside) / "secret").read_text() == "seen"


@ways
def test_the_environment_holds_no_secrets(without: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-you")
    output = run("import os; print(dict(os.environ))", without=without).output
    assert "sk-not-for-you" not in output and "PATH" not in output


@ways
def test_memory_and_descriptors_of_other_processes_are_not_read(without: Sequence[str]) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(attempt):
    try: return attempt()
    except OSError: return 0
init = os.getppid()
print(tried(lambda: open(f"/proc/{init}/mem", "rb") and 1), tried(lambda: len(os.listdir(f"/proc/{init}/fd"))))
print(libc.ptrace(16, init, 0, 0))
print([number for number in range(3, 256) if tried(lambda: os.fstat(number) and 1)])
"""
    assert run(code, without=without).output == "0 0\n-1\n[]\n"


@ways
def test_dropped_rights_cannot_be_regained(without: Sequence[str]) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def tried(attempt):
    try: attempt()
    except OSError: return 0
    return 1
print(tried(lambda: os.chown(".", 1, 1)), tried(lambda: os.mknod("disk", 0o60600, os.makedev(8, 0))))
print(libc.mount(b"none", b".", b"tmpfs", 0, None), libc.setns(0, 0), libc.sethostname(b"x", 1))
"""
    assert run(code, without=without).output == "0 0\n-1 -1 -1\n"


@ways
def test_nothing_is_left_of_a_directory(
    without: Sequence[str], open_to_all: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", open_to_all)
    code = """
import os
os.mkdir("locked"); open("locked/a", "w").close(); os.symlink("/", "locked/b"); os.mkdir("locked/c", 0)
for n in range(1500):
    os.mkdir("deep"); os.chdir("deep")
open("end", "w").close()
print("made")
"""
    assert run(code, without=without, seconds=20.0).output == "made\n"
    assert list(Path(open_to_all).iterdir()) == []


@ways
def test_when_the_run_is_killed_so_are_its_programs(without: Sequence[str], open_to_all: str) -> None:
    script = f"""
import asyncio, tempfile
from etude.rewards.sandbox.sandbox import Sandbox, SandboxLimits
tempfile.tempdir = {open_to_all!r}  # who is killed removes nothing
code = {NAMED.format(name="etude-orphan")!r} + "import os, time; os.fork() or os.setsid(); time.sleep(600)"
async def main():
    async with Sandbox(code, SandboxLimits(), without={list(without)!r}) as sandbox:
        await sandbox.run("", 600.0)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3])
    try:
        until = time.monotonic() + 30
        while len(left("etude-orphan", within=0.0)) < 2:
            assert time.monotonic() < until and parent.poll() is None, "the program never came up"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    assert left("etude-orphan", within=10.0) == []


def test_a_cancelled_run_leaves_nothing() -> None:
    async def cancelled() -> None:
        code = NAMED.format(name="etude-cancel") + "import time; time.sleep(600)"
        async with Sandbox(code, SandboxLimits()) as sandbox:
            call = asyncio.create_task(sandbox.run("", 600.0))
            while not left("etude-cancel", within=0.0):
                await asyncio.sleep(0.02)
            call.cancel()

    asyncio.run(cancelled())
    assert left("etude-cancel") == []


# -- protections of this machine --------------------------------------------------------------------------------------


def test_protections_that_are_left_out_do_not_hold() -> None:
    nothing = ("namespaces", "landlock", "filter", "stranger")
    assert probe_protections(nothing) < set(PROTECTIONS), "the attempts find no way where there is one"
    assert probe_protections() >= probe_protections(nothing)


def test_a_sandbox_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "_BOOT", "raise SystemExit('no room here')")
    with pytest.raises(SandboxLostError, match=r"it ended"):
        run("print(1)")
    with pytest.raises(RewardError, match=r"No program can run here: the sandbox could not start, because it ended"):
        asyncio.run(probe._run_probe(()))
    monkeypatch.setattr(probe, "_PROBE", "print('nonsense')")
    monkeypatch.undo()
    monkeypatch.setattr(probe, "_PROBE", "print('nonsense')")
    with pytest.raises(RewardError, match=r"the probe's program ended with exit 0"):
        asyncio.run(probe._run_probe(()))
