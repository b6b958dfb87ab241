"""A box: a process that keeps one program which nobody trusts, as far apart from this machine as the kernel grants.

    async with Box(code, Limits()) as box:
        ended = await box.run("3 4", seconds=5)      # as a script
        found = await box.examine(tests, seconds=5)  # its functions, by tests that it cannot reach

`etude.rewards.inside` is what runs there: a fresh interpreter without site packages, with an environment that holds
nothing, in a directory that is removed. It is spoken to over a pipe, and gone, with all that it started, when the box
is closed. Which protections hold on this machine is not taken from a table: `protections` lets a program try.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, Self
from uuid import uuid4

from etude.errors import RewardError
from etude.rewards.inside.confine import Rules
from etude.rewards.inside.frames import HEAD, LARGEST, packed, unpacked

__all__ = ["PROTECTIONS", "Box", "BoxLostError", "Ended", "Limits", "Protection", "protections"]

Protection = Literal["network", "files", "processes"]


class Told(NamedTuple):
    """What to say of a protection, as a sentence on programs goes on."""

    held: str
    lacking: str


PROTECTIONS: Mapping[Protection, Told] = {
    "network": Told("reach no network", "reach the network"),
    "files": Told(
        "read and write no files but Python's and their own directory's", "read and write files as this user may"
    ),
    "processes": Told(
        "signal no other processes and multiply only to their limit",
        "signal other processes of this user, or multiply without limit",
    ),
}
"""What may hold for programs in a box."""

CLOSING = 4.0
"""Seconds that a box has to end all that its program started; then its process group is killed."""
STARTING = 20.0
"""Seconds within which a box is there, on however busy a machine."""
_BOOT = """
import sys, types
for name, place in (("etude", ""), ("etude.rewards", "/rewards")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + place]
from etude.rewards.inside.keeper import main
main()
"""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class BoxLostError(Exception):
    """The box itself ended: the program is to blame for nothing that is known."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    cpu: int = 5
    """Seconds of a processor, for each process and each run."""
    memory_mb: int = 1024
    """Megabytes of address space, for each process."""
    disk_mb: int = 64
    """Megabytes that may be written."""
    output_kb: int = 1024
    """Kilobytes of output that are read; a program that writes more has failed."""
    processes: int = 8
    """Processes and threads at a time."""
    packages: bool = False
    """Whether the packages that are installed here may be imported."""


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what it wrote."""

    how: Literal["exit", "signal", "late", "flood"]
    """By itself, by a signal, not in time, or with more output than is read."""
    code: int
    """The exit code, or minus the signal's number."""
    output: str
    seconds: float

    @property
    def well(self) -> bool:
        """Whether it ended as programs should."""
        return self.how == "exit" and self.code == 0


class Box:
    """One program, kept. Open it once; runs follow each other. `BoxLostError` where the box itself fails.

    without: means of protection that are left out, to try what holds without them.
    """

    def __init__(self, code: str, limits: Limits, *, without: Sequence[str] = ()) -> None:
        self._code, self._limits, self._without = code, limits, tuple(without)
        self._directory = Path()
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="etude-box-"))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *_command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd=self._directory,
                start_new_session=True,
            )
            await self._send(_start(self._code, self._limits, self._directory, self._without))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            if self._process is not None:
                await _ended(self._process)
        finally:
            await asyncio.to_thread(_removed, self._directory)

    async def run(self, text: str, seconds: float) -> Ended:
        """Run the program as a script, with this on its standard input."""
        most = self._limits.output_kb << 10
        answer = await self._asked({"do": "run", "input": text, "seconds": seconds, "output": most}, seconds)
        return Ended(answer["ended"], answer["code"], answer["output"], answer["took"])

    async def examine(self, tests: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Have the program's functions tried (`etude.rewards.inside.examiner`): what was found, test by test.

        The tests leave this process only when the program is loaded in one of its own.
        """
        await self._asked({"do": "load"}, 0.0)
        answer = await self._asked({"do": "examine", "tests": tests, "seconds": seconds}, seconds)
        found: list[dict[str, Any]] = answer["found"]
        return found

    async def _asked(self, request: Mapping[str, Any], seconds: float) -> Any:
        assert self._process is not None and self._process.stdout is not None, "the box is not open"
        try:
            async with asyncio.timeout(STARTING + seconds):
                await self._send(request)
                length = int.from_bytes(await self._process.stdout.readexactly(HEAD), "big")
                if length > LARGEST:
                    raise BoxLostError(f"it sent a message of {length} bytes")
                return unpacked(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise BoxLostError(f"it ended{await self._last_words()}") from error
        except TimeoutError as error:
            raise BoxLostError(f"it did not answer within {STARTING + seconds:g} seconds") from error

    async def _last_words(self) -> str:
        """What a box said in the end, to be put behind a sentence."""
        assert self._process is not None and self._process.stderr is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                said = (await self._process.stderr.read()).decode(errors="replace").strip()
                return f": {said.splitlines()[-1]}" if said else ""
        return ""

    async def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(packed(message))
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise BoxLostError(f"it ended{await self._last_words()}") from error


def _command() -> list[str]:
    python = str(Path(sys.executable).resolve())
    return [python, "-I", "-S", "-X", "utf8", "-c", _BOOT, str(Path(__file__).parents[1])]


def _start(code: str, limits: Limits, directory: Path, without: Sequence[str] = ()) -> dict[str, Any]:
    """The first message to a keeper."""
    packages = [sysconfig.get_path(name) for name in ("purelib", "platlib")] if limits.packages else []
    rules = Rules(
        str(directory),
        limits.cpu,
        limits.memory_mb << 20,
        limits.disk_mb << 20,
        limits.processes,
        list(dict.fromkeys(packages)),
        list(without),
    )
    return {"code": code, "rules": vars(rules)}


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Have a box end what it holds, and itself; kill it where it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(CLOSING):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _removed(directory: Path) -> None:
    """Remove a directory, however deep a program has made it and whatever it has forbidden."""
    while directory.exists():
        for path in list(directory.iterdir()):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
                for inner in list(path.iterdir()):
                    if inner.is_dir() and not inner.is_symlink():
                        inner.chmod(0o700)  # a directory is not moved by those who may not write in it
                    inner.rename(directory / f"{uuid4().hex}")
                path.rmdir()
            else:
                path.unlink()
        if not any(directory.iterdir()):
            directory.rmdir()


# -- what holds here --------------------------------------------------------------------------------------------------


@cache
def protections(without: Sequence[str] = ()) -> frozenset[Protection]:
    """What holds for programs in a box on this machine, tried out once: a program did its best against each.

    `RewardError` where programs cannot be run at all.
    """
    with ThreadPoolExecutor(1) as pool:  # there may be an event loop in this thread
        return pool.submit(asyncio.run, _tried(tuple(without))).result()


async def _tried(without: Sequence[str]) -> frozenset[Protection]:
    limits = Limits()
    with (
        TemporaryDirectory(prefix="etude-outside-") as outside,
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen([*_command()[:3], "-c", "input()"], stdin=subprocess.PIPE) as bystander,
    ):
        Path(outside).chmod(0o777)
        (Path(outside) / "secret").write_text("seen")
        facts = [listener.getsockname()[1], outside, bystander.pid, limits.processes + _SLACK]
        try:
            async with Box(_PROBE, limits, without=without) as box:
                ended = await box.run(json.dumps(facts), STARTING)
        except BoxLostError as error:
            raise RewardError(f"No program can be run here: the box that keeps it is lost, because {error}.") from error
        hurt = bystander.poll() is not None
        bystander.kill()
    try:
        broken = set(json.loads(ended.output)) | ({"processes"} if hurt else set())
    except ValueError:
        raise RewardError(
            f"No program can be run here: one that does nothing wrong ended with {ended.how} {ended.code}."
        ) from None
    return frozenset(name for name in PROTECTIONS if name not in broken)


_SLACK = 64
"""Processes by which a program may exceed its limit where others of its user come and go beside it."""
_PROBE = """
import fcntl, json, os, signal, socket, time
port, outside, bystander, most = json.loads(input())

def succeeds(attempt):
    try:
        attempt()
    except OSError:
        return False
    return True

def connects():
    socket.create_connection(("127.0.0.1", port), timeout=2).close()

def reads():
    open(outside + "/secret").close()

def writes():
    open(outside + "/written", "w").close()

def alters():
    os.utime(outside + "/secret")

def signals():
    os.kill(bystander, signal.SIGTERM)

def delegates():
    reads, writes = os.pipe()
    for command, value in ((8, bystander), (10, signal.SIGTERM), (fcntl.F_SETFL, os.O_ASYNC)):
        fcntl.fcntl(reads, command, value)
    os.write(writes, b"x")
    raise OSError("whether it came is seen from outside")

def multiplies():
    for _ in range(most):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)

attempts = {"network": [connects], "files": [reads, writes, alters], "processes": [signals, delegates, multiplies]}
print(json.dumps([name for name, tries in attempts.items() if any([succeeds(each) for each in tries])]))
"""
