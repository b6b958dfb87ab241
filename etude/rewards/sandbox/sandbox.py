"""A box: a process that keeps one program which nobody trusts, as far apart from this machine as the kernel grants.

    async with Box(code, Limits()) as box:
        passed = await box.prints("3 4", wanted="7", seconds=5)         # as a script
        found = await box.examine(tests, count=len(tests), seconds=5)   # its functions, by tests that it cannot reach

`etude.rewards.sandbox.guest` is what runs there: a fresh interpreter without site packages, with an environment that
holds nothing, in a directory that is removed. It is spoken to over a pipe, and gone, with all that it started, when the
box is closed. What a program prints or returns stays there and is compared there; a verdict of bounded length comes
back. Which protections hold on this machine, `etude.rewards.sandbox.probe` tries out.
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

from etude.rewards.sandbox.guest.isolation import SandboxSpec
from etude.rewards.sandbox.guest.pipe_messages import HEAD, pack_message, unpack_message
from etude.rewards.sandbox.guest.test_runner import INVALID, PASSED

__all__ = ["ProgramResult", "ProgramTestResults", "Sandbox", "SandboxBrokenError", "SandboxLimits", "SandboxLostError"]

CLOSE_TIMEOUT_S = 4.0
"""Seconds that a box has to end all that its program started; then its process group is killed."""
START_TIMEOUT_S = 20.0
"""Seconds within which a box is there, on however busy a machine."""
COMPARE_TIMEOUT_S = 5.0
"""Seconds that comparing what a script printed may take; a program whose output takes longer has failed."""
_MAX_REPLY_BYTES = 4096
"""Bytes of an answer that holds no more than how something ended."""
_MAX_STDERR_CHARS = 300
"""Characters of what a box said in the end that are told."""
_BOOT = """
import sys, types
for name, path in (("etude", ""), ("etude.rewards", "/rewards"), ("etude.rewards.sandbox", "/rewards/sandbox")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + path]
from etude.rewards.sandbox.guest.init_process import main
main()
"""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class SandboxLostError(Exception):
    """There is no box: the program is to blame for nothing that is known."""


class SandboxBrokenError(SandboxLostError):
    """A box that was there ended when its program could run: by the machine, or by the program."""


@dataclass(frozen=True)
class SandboxLimits:
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
class ProgramResult:
    """How a run ended, and what it wrote."""

    status: Literal["exit", "signal", "late", "flood"]
    """By itself, by a signal, not in time, or with more output than is read."""
    exit_code: int
    """The exit code, or minus the signal's number."""
    output: str
    seconds: float

    @property
    def is_success(self) -> bool:
        """Whether it ended as programs should."""
        return self.status == "exit" and self.exit_code == 0


class ProgramTestResults(NamedTuple):
    """The results of tests."""

    passed: tuple[bool, ...]
    """Test by test, as far as they came."""
    invalid_reason: str
    """Why no program can be put to the next one, where that is so."""


class Sandbox:
    """One program, kept. Open it once; runs follow each other. `SandboxLostError` where the box cannot be had, and
    `SandboxBrokenError` where it ends before it is closed.

    without: means of protection that are left out, to try what holds without them.
    """

    def __init__(self, code: str, limits: SandboxLimits, *, without: Sequence[str] = ()) -> None:
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
            await self._request(_make_start_message(self._code, self._limits, self._directory, self._without), 0.0)
        except SandboxBrokenError as error:
            await self.__aexit__()
            raise SandboxLostError(str(error)) from error
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            if self._process is not None:
                await _close_process(self._process)
        finally:
            await asyncio.to_thread(_remove_directory, self._directory)

    async def run(self, text: str, seconds: float) -> ProgramResult:
        """Run the program as a script, with this on its standard input, and return what it printed."""
        result = await self._run(text, seconds)
        max_bytes = _MAX_REPLY_BYTES + 6 * (self._limits.output_kb << 10)  # a letter may become six in a message
        return replace(result, output=(await self._request({"do": "output"}, 0.0, max_bytes=max_bytes))["output"])

    async def check_output(self, text: str, expected: str, seconds: float) -> bool:
        """Run the program as a script, and have what it printed compared there with what is wanted."""
        if not (await self._run(text, seconds)).is_success:
            return False
        request = {"do": "compare", "seconds": COMPARE_TIMEOUT_S, "cpu": self._limits.cpu}
        reply = await self._request(request, COMPARE_TIMEOUT_S, expected)
        return str(reply["found"]) == PASSED

    async def run_tests(self, tests: Mapping[str, Any], count: int, seconds: float) -> ProgramTestResults:
        """Have the program's functions put to so many tests (`etude.rewards.sandbox.guest.test_runner`).

        The tests leave this process only when the program is loaded in one of its own. That one process is there for
        all of them, and may use the processor time of all, as far as the seconds allow.
        """
        cpu = max(self._limits.cpu, min(self._limits.cpu * count, math.ceil(seconds)))
        await self._request({"do": "load", "cpu": cpu}, 0.0)
        request = {"do": "examine", "count": count, "seconds": seconds, "cpu": cpu}
        reply = await self._request(request, seconds, tests, max_bytes=_MAX_REPLY_BYTES + count)
        letters, _, invalid_reason = str(reply["found"]).partition(INVALID)
        return ProgramTestResults(tuple(letter == PASSED for letter in letters[:count]), invalid_reason)

    async def _run(self, text: str, seconds: float) -> ProgramResult:
        max_output_bytes, cpu = self._limits.output_kb << 10, self._limits.cpu
        request = {"do": "run", "input": text, "seconds": seconds, "output": max_output_bytes, "cpu": cpu}
        reply = await self._request(request, seconds)
        return ProgramResult(reply["ended"], reply["code"], "", reply["took"])

    async def _request(
        self, request: Mapping[str, Any], seconds: float, *expected: Any, max_bytes: int = _MAX_REPLY_BYTES
    ) -> Any:
        """The answer to a request. expected: what follows it, for an examiner alone to read. most: bytes of the answer;
        a longer one is refused before it is read."""
        assert self._process is not None and self._process.stdout is not None, "the box is not open"
        try:
            async with asyncio.timeout(START_TIMEOUT_S + seconds):
                for message in (request, *expected):
                    await self._send(message)
                length = int.from_bytes(await self._process.stdout.readexactly(HEAD), "big")
                if length > max_bytes:
                    raise SandboxBrokenError(f"it sent a message of {length} bytes")
                return unpack_message(await self._process.stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise SandboxBrokenError(f"it ended{await self._read_last_error()}") from error
        except TimeoutError as error:
            raise SandboxBrokenError(f"it did not answer within {START_TIMEOUT_S + seconds:g} seconds") from error

    async def _read_last_error(self) -> str:
        """What a box said in the end, to be put behind a sentence."""
        assert self._process is not None and self._process.stderr is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                text = (await self._process.stderr.read()).decode(errors="replace").strip()
                return f": {text.splitlines()[-1][:_MAX_STDERR_CHARS]}" if text else ""
        return ""

    async def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(pack_message(message))
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise SandboxBrokenError(f"it ended{await self._read_last_error()}") from error


def _command() -> list[str]:
    python = str(Path(sys.executable).resolve())
    return [python, "-I", "-S", "-X", "utf8", "-c", _BOOT, str(Path(__file__).parents[2])]


def _make_start_message(
    code: str, limits: SandboxLimits, directory: Path, without: Sequence[str] = ()
) -> dict[str, Any]:
    """The first message to a keeper."""
    packages = [sysconfig.get_path(name) for name in ("purelib", "platlib")] if limits.packages else []
    spec = SandboxSpec(
        str(directory),
        limits.memory_mb << 20,
        limits.disk_mb << 20,
        limits.processes,
        list(dict.fromkeys(packages)),
        list(without),
    )
    return {"code": code, "rules": vars(spec)}


async def _close_process(process: asyncio.subprocess.Process) -> None:
    """Have a box end what it holds, and itself; kill it where it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _remove_directory(directory: Path) -> None:
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
