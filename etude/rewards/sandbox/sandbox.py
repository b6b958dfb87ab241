"""The sandbox of one untrusted program: processes that are isolated from this machine as far as the kernel allows.

    async with Sandbox(code, SandboxLimits()) as sandbox:
        passed = await sandbox.check_output("3 4", expected="7", seconds=5)      # as a script
        results = await sandbox.run_tests(tests, count=len(tests), seconds=5)    # its functions, by hidden tests

The sandbox runs `etude.rewards.sandbox.guest`: a fresh interpreter without site packages, with a minimal environment,
in a temporary directory. The trainer talks to it over a pipe. Closing the sandbox ends it with all that it started.
The output and the results of a program stay in the sandbox and are compared there. Only a verdict of bounded length
comes back. `etude.rewards.sandbox.probe` finds out which protections hold on this machine.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self
from uuid import uuid4

from pydantic import Field

from etude.child_process import kill_group
from etude.config import Config
from etude.rewards.sandbox.guest.isolation import SandboxSpec
from etude.rewards.sandbox.guest.pipe_messages import HEAD, pack_message, unpack_message
from etude.rewards.sandbox.guest.test_runner import INVALID, PASSED

CLOSE_TIMEOUT_S = 4.0
"""Seconds that a sandbox may take to end all that its program started; then its process group is killed."""
START_TIMEOUT_S = 20.0
"""Seconds that a sandbox may take to start, also on a busy machine."""
COMPARE_TIMEOUT_S = 5.0
"""Seconds of comparing a script's output. A program whose output takes longer has failed."""
_MAX_REPLY_BYTES = 4096
"""The most bytes of a reply that holds only a status."""
_MAX_STDERR_CHARS = 300
"""The most characters of a sandbox's last error line that a message quotes."""
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
    """The sandbox could not start. The program is not to blame."""


class SandboxBrokenError(SandboxLostError):
    """The sandbox ended while its program could run: the machine or the program ended it."""


class SandboxLimits(Config):
    """The limits of a program."""

    cpu: int = Field(
        5,
        ge=1,
        description="processor seconds of a process for each test; a process for all tests has the sum, up to "
        "`total_timeout`",
    )
    memory_mb: int = Field(
        1024, ge=64, description="megabytes of address space of each process; larger lets bigger programs run"
    )
    disk_mb: int = Field(64, ge=1, description="megabytes that a program may write")
    output_kb: int = Field(1024, ge=1, description="kilobytes that a program may print in one test; more fails it")
    max_processes: int = Field(8, ge=1, description="processes and threads of a program at a time")
    packages: bool = Field(False, description="let programs import the packages that are installed here, such as numpy")


class ProgramResult(NamedTuple):
    """The status and the output of a run."""

    status: Literal["exit", "signal", "late", "flood"]
    """The end of the run: by exit, by a signal, by the time limit, or with more output than `output_kb`."""
    exit_code: int
    """The exit code, or minus the signal's number."""
    output: str
    seconds: float

    @property
    def is_success(self) -> bool:
        """True for exit code 0."""
        return self.status == "exit" and self.exit_code == 0


class ProgramTestResults(NamedTuple):
    """The results of tests."""

    passed: tuple[bool, ...]
    """The result of each test that was run, in order."""
    invalid_reason: str
    """The reason why the next test cannot run against any program; empty if there is none."""


class Sandbox:
    """A sandbox with one program. Open it once; its runs follow each other.

    Raises `SandboxLostError` if it cannot start, and `SandboxBrokenError` if it ends before it is closed.

    without: means of protection that are left out, to test the others alone.
    """

    def __init__(self, code: str, limits: SandboxLimits, *, without: Sequence[str] = ()) -> None:
        self._code = code
        self._limits = limits
        self._without = tuple(without)
        self._directory = Path()
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="etude-box-"))
        python, package = str(Path(sys.executable).resolve()), str(Path(__file__).parents[2])
        try:
            self._process = await asyncio.create_subprocess_exec(
                python,
                "-I",
                "-S",
                "-X",
                "utf8",
                "-c",
                _BOOT,
                package,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd=self._directory,
                start_new_session=True,
            )
            await self._request({"code": self._code, "rules": self._make_spec()._asdict()}, 0.0)
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, SandboxBrokenError):
                raise SandboxLostError(str(error)) from error
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            if self._process is not None:
                await _close_process(self._process)
        finally:
            await asyncio.to_thread(_remove_directory, self._directory)

    async def run(self, text: str, seconds: float) -> ProgramResult:
        """Run the program as a script with `text` on its standard input, and return its status and output."""
        result = await self._run(text, seconds)
        max_bytes = _MAX_REPLY_BYTES + 6 * (self._limits.output_kb << 10)  # JSON may escape a letter with six
        return result._replace(output=(await self._request({"do": "output"}, 0.0, max_bytes=max_bytes))["output"])

    async def check_output(self, text: str, expected: str, seconds: float) -> bool:
        """Run the program as a script, compare its output in the sandbox with `expected`, and return True if equal."""
        if not (await self._run(text, seconds)).is_success:
            return False
        request = {"do": "compare", "seconds": COMPARE_TIMEOUT_S, "cpu": self._limits.cpu}
        reply = await self._request(request, COMPARE_TIMEOUT_S, expected)
        return str(reply["found"]) == PASSED

    async def run_tests(self, tests: Mapping[str, Any], count: int, seconds: float) -> ProgramTestResults:
        """Run `count` tests against the program's functions (`etude.rewards.sandbox.guest.test_runner`).

        The program is loaded in its own process before the tests leave this one. That process serves all tests, and
        may use the processor time of all, as far as `seconds` allow.
        """
        cpu = max(self._limits.cpu, min(self._limits.cpu * count, math.ceil(seconds)))
        await self._request({"do": "load", "cpu": cpu}, 0.0)
        request = {"do": "examine", "count": count, "seconds": seconds, "cpu": cpu}
        reply = await self._request(request, seconds, tests, max_bytes=_MAX_REPLY_BYTES + count)
        letters, _, invalid_reason = str(reply["found"]).partition(INVALID)
        return ProgramTestResults(tuple(letter == PASSED for letter in letters[:count]), invalid_reason)

    def _make_spec(self) -> SandboxSpec:
        limits = self._limits
        packages = {sysconfig.get_path(name) for name in ("purelib", "platlib")} if limits.packages else set()
        memory, disk = limits.memory_mb << 20, limits.disk_mb << 20
        return SandboxSpec(str(self._directory), memory, disk, limits.max_processes, sorted(packages), self._without)

    async def _run(self, text: str, seconds: float) -> ProgramResult:
        max_output_bytes, cpu = self._limits.output_kb << 10, self._limits.cpu
        request = {"do": "run", "input": text, "seconds": seconds, "output": max_output_bytes, "cpu": cpu}
        reply = await self._request(request, seconds)
        return ProgramResult(reply["ended"], reply["code"], "", reply["took"])

    async def _request(
        self, request: Mapping[str, Any], seconds: float, *expected: Any, max_bytes: int = _MAX_REPLY_BYTES
    ) -> Any:
        """Send a request and return the reply.

        expected: messages after the request, which only a test runner reads. max_bytes: the most bytes of the reply; a
        longer one is refused before it is read.
        """
        assert self._process is not None, "the sandbox is not open"
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "they are pipes"
        try:
            async with asyncio.timeout(START_TIMEOUT_S + seconds):
                for message in (request, *expected):
                    stdin.write(pack_message(message))
                    await stdin.drain()
                length = int.from_bytes(await stdout.readexactly(HEAD), "big")
                if length > max_bytes:
                    raise SandboxBrokenError(f"it sent a message of {length} bytes")
                return unpack_message(await stdout.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise SandboxBrokenError(f"it ended{await self._read_last_error()}") from error
        except TimeoutError as error:
            raise SandboxBrokenError(f"it did not answer within {START_TIMEOUT_S + seconds:g} seconds") from error

    async def _read_last_error(self) -> str:
        """Return the last error line of the sandbox as the end of a sentence."""
        assert self._process is not None and self._process.stderr is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                text = (await self._process.stderr.read()).decode(errors="replace").strip()
                return f": {text.splitlines()[-1][:_MAX_STDERR_CHARS]}" if text else ""
        return ""


async def _close_process(process: asyncio.subprocess.Process) -> None:
    """Close a sandbox's pipe, on which it ends all its processes and itself. Kill it if it does not end in time."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        kill_group(process.pid)
        await process.wait()


def _remove_directory(directory: Path) -> None:
    """Remove a directory, also if a program has nested it deeply or removed its permissions."""
    while directory.exists():
        for path in list(directory.iterdir()):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
                for inner in list(path.iterdir()):
                    if inner.is_dir() and not inner.is_symlink():
                        inner.chmod(0o700)  # moving a directory needs the right to write in it
                    inner.rename(directory / f"{uuid4().hex}")
                path.rmdir()
            else:
                path.unlink()
        if not any(directory.iterdir()):
            directory.rmdir()
