"""A box: a process that keeps one program which nobody trusts, as far apart from this machine as the kernel grants.

    async with Box(code, Limits()) as box:
        passed = await box.prints("3 4", wanted="7", seconds=5)         # as a script
        found = await box.examine(tests, count=len(tests), seconds=5)   # its functions, by tests that it cannot reach

`etude.rewards.inside` is what runs there: a fresh interpreter without site packages, with an environment that holds
nothing, in a directory that is removed. It is spoken to over a pipe, and gone, with all that it started, when the box
is closed. What a program prints or returns stays there and is compared there; a verdict of bounded length comes back.
Which protections hold on this machine, `etude.rewards.probe` tries out.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self
from uuid import uuid4

from etude.rewards.inside.confine import Rules
from etude.rewards.inside.examiner import PASSED, UNFIT
from etude.rewards.inside.frames import HEAD, packed, unpacked

__all__ = ["Box", "BoxBrokenError", "BoxLostError", "Ended", "Found", "Limits"]

CLOSING = 4.0
"""Seconds that a box has to end all that its program started; then its process group is killed."""
STARTING = 20.0
"""Seconds within which a box is there, on however busy a machine."""
COMPARING = 5.0
"""Seconds that comparing what a script printed may take; a program whose output takes longer has failed."""
_ANSWER = 4096
"""Bytes of an answer that holds no more than how something ended."""
_WORDS = 300
"""Characters of what a box said in the end that are told."""
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
    """There is no box: the program is to blame for nothing that is known."""


class BoxBrokenError(BoxLostError):
    """A box that was there ended when its program could run: by the machine, or by the program."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    cpu: int = 5
    """Seconds of a processor, for each process and each test."""
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


class Found(NamedTuple):
    """The results of tests."""

    passed: tuple[bool, ...]
    """Test by test, as far as they came."""
    unfit: str
    """Why no program can be put to the next one, where that is so."""


class Box:
    """One program, kept. Open it once; runs follow each other. `BoxLostError` where the box cannot be had, and
    `BoxBrokenError` where it ends before it is closed.

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
            await self._asked(_start(self._code, self._limits, self._directory, self._without), 0.0)
        except BoxBrokenError as error:
            await self.__aexit__()
            raise BoxLostError(str(error)) from error
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
        """Run the program as a script, with this on its standard input, and return what it printed."""
        ended = await self._run(text, seconds)
        most = _ANSWER + 6 * (self._limits.output_kb << 10)  # a letter may become six in a message
        return replace(ended, output=(await self._asked({"do": "output"}, 0.0, most=most))["output"])

    async def prints(self, text: str, wanted: str, seconds: float) -> bool:
        """Run the program as a script, and have what it printed compared there with what is wanted."""
        if not (await self._run(text, seconds)).well:
            return False
        request = {"do": "compare", "seconds": COMPARING, "cpu": self._limits.cpu}
        answer = await self._asked(request, COMPARING, wanted)
        return str(answer["found"]) == PASSED

    async def examine(self, tests: Mapping[str, Any], count: int, seconds: float) -> Found:
        """Have the program's functions put to so many tests (`etude.rewards.inside.examiner`).

        The tests leave this process only when the program is loaded in one of its own. That one process is there for
        all of them, and may use the processor time of all, as far as the seconds allow.
        """
        cpu = max(self._limits.cpu, min(self._limits.cpu * count, math.ceil(seconds)))
        await self._asked({"do": "load", "cpu": cpu}, 0.0)
        request = {"do": "examine", "count": count, "seconds": seconds, "cpu": cpu}
        answer = await self._asked(request, seconds, tests, most=_ANSWER + count)
        letters, _, unfit = str(answer["found"]).partition(UNFIT)
        return Found(tuple(letter == PASSED for letter in letters[:count]), unfit)

    async def _run(self, text: str, seconds: float) -> Ended:
        most, cpu = self._limits.output_kb << 10, self._limits.cpu
        request = {"do": "run", "input": text, "seconds": seconds, "output": most, "cpu": cpu}
        answer = await self._asked(request, seconds)
        return Ended(answer["ended"], answer["code"], "", answer["took"])

    async def _asked(self, request: Mapping[str, Any], seconds: float, *expected: Any, most: int = _ANSWER) -> Any:
        """The answer to a request. expected: what follows it, for an examiner alone to read. most: bytes of the answer;
        a longer one is refused before it is read."""
        assert self._process is not None and self._process.stdout is not None, "the box is not open"
        try:
            async with asyncio.timeout(STARTING + seconds):
                for message in (request, *expected):
                    await self._send(message)
                length = int.from_bytes(await self._process.stdout.readexactly(HEAD), "big")
                if length > most:
                    raise BoxBrokenError(f"it sent a message of {length} bytes")
                return unpacked(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise BoxBrokenError(f"it ended{await self._last_words()}") from error
        except TimeoutError as error:
            raise BoxBrokenError(f"it did not answer within {STARTING + seconds:g} seconds") from error

    async def _last_words(self) -> str:
        """What a box said in the end, to be put behind a sentence."""
        assert self._process is not None and self._process.stderr is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING):
                said = (await self._process.stderr.read()).decode(errors="replace").strip()
                return f": {said.splitlines()[-1][:_WORDS]}" if said else ""
        return ""

    async def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(packed(message))
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise BoxBrokenError(f"it ended{await self._last_words()}") from error


def _command() -> list[str]:
    python = str(Path(sys.executable).resolve())
    return [python, "-I", "-S", "-X", "utf8", "-c", _BOOT, str(Path(__file__).parents[1])]


def _start(code: str, limits: Limits, directory: Path, without: Sequence[str] = ()) -> dict[str, Any]:
    """The first message to a keeper."""
    packages = [sysconfig.get_path(name) for name in ("purelib", "platlib")] if limits.packages else []
    rules = Rules(
        str(directory),
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
