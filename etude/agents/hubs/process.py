"""One guest: the process of a hub's own Python that plays its environments, at the other end of a pipe.

    process ══ JSON lines ══ guest/serve.py ── guest/gymnasium_guest.py ── the hub's package

consumes       requests; the guest's lines, which `guest/serve.py` describes
produces       the answer to each request, or the error of its environment
waits for      the guest, as long as the caller does
unblocked by   the answer, or the end of the guest, after which every request fails with a `GuestLostError`

A guest that breaks the protocol is killed. It has a process group of its own, which ends with this process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from etude.agents.hubs.guest.serve import PROTOCOL
from etude.child_process import describe_exit, kill_group, reaper
from etude.config.env import build_program_env
from etude.errors import ConfigError, GuestLostError, HubError

SERVE = Path(__file__).with_name("guest") / "serve.py"
PINS = Path(__file__).with_name("pins")
"""A file for each hub that has packages: every package and its version, as `pip freeze` lists them."""
START_TIMEOUT_S = 600.0
"""Seconds in which a guest must be ready. Some hubs import for minutes on a busy machine."""
EXIT_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 32 << 20
"""The most bytes of one line of a guest."""
TAIL_BYTES = 64 << 10
"""Bytes that are kept of the end of a guest's standard error."""
TAIL_CHARACTERS = 2000
"""Characters of it that an error quotes."""


@dataclass(frozen=True)
class HubSpec:
    """The environments of a hub, and the Python that plays them."""

    hub: str
    """The name of a file in `guest`, such as `gymnasium`."""
    what: str
    """The environment's name within the hub."""
    python: Path
    """The Python that has the hub's package."""
    options: Mapping[str, Any]
    max_turns: int
    """The most answers of a rollout."""
    memory_mb: int | None = None
    """Megabytes of address space of a guest; None sets no limit."""
    section: str = "env"
    """The section of options that names it."""

    @property
    def option(self) -> str:
        """The option that names it, with its value."""
        return f"{self.section}.hub={self.title}"

    @property
    def title(self) -> str:
        """The name of the environment in messages."""
        return f"{self.hub}:{self.what}"


class HubProcess:
    """One guest. All methods are called on one event loop."""

    def __init__(self, spec: HubSpec) -> None:
        self._spec = spec
        self._numbers = count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._late: set[int] = set()
        """Requests whose callers no longer wait for the answer."""
        self._tail = bytearray()
        self._why = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.has_answered = False
        """True after the first answer to a request."""
        self.version = ""
        """The hub's package, with its version."""
        self.ended = asyncio.Event()

    async def start(self) -> None:
        """Start the guest, and wait until it is ready. Raise `ConfigError` if it refuses its options."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._spec.python,
                SERVE,
                self._spec.hub,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=build_program_env({}),
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            raise ConfigError(
                f"`{self._spec.option}` is played by {self._spec.python}, which cannot be run ({error.strerror}). "
                f"Name a Python that has the hub's package by `{self._spec.section}.python`."
            ) from error
        reaper.add(self._process.pid)
        self._tasks = [asyncio.create_task(self._read_lines()), asyncio.create_task(self._read_errors())]
        spec = self._spec
        self._write(
            protocol=PROTOCOL,
            what=spec.what,
            options=dict(spec.options),
            max_turns=spec.max_turns,
            memory_mb=spec.memory_mb,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                first = await self._ready
        except TimeoutError as error:
            await self.kill(f"was not ready within {START_TIMEOUT_S:g} s")
            raise self.lost() from error
        except asyncio.CancelledError:
            await self.kill("was not needed any more")
            raise
        if "refused" in first:
            await self.kill("refused its options")
            raise ConfigError(self._describe_refusal(first))
        self.version = str(first["ready"])

    async def ask(self, do: str, **fields: Any) -> Any:
        """Send a request, and return its result. Raise `HubError` where the environment failed."""
        if self._why:
            raise self.lost()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._write(id=number, do=do, **fields)
        self._pending[number] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            self._late.add(number)
            raise
        finally:
            self._pending.pop(number, None)

    def tell(self, do: str, **fields: Any) -> None:
        """Send a request that has no answer."""
        if not self._why:
            self._write(do=do, **fields)

    async def kill(self, why: str) -> None:
        """Kill the guest, and wait until it has ended. why: the rest of a sentence about it."""
        self._why = self._why or why
        if self._process is not None and not self.ended.is_set():  # else its number may be another process's by now
            kill_group(self._process.pid)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), EXIT_TIMEOUT_S)

    def _write(self, **message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None, "it was started"
        try:
            line = json.dumps(message, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise HubError(f"it was to be sent a value that is no JSON ({error})") from error
        self._process.stdin.write(line.encode() + b"\n")

    # -- what the guest writes -----------------------------------------------------------------------------------------

    async def _read_lines(self) -> None:
        """Take the guest's lines until it ends, or breaks the protocol."""
        assert self._process is not None and self._process.stdout is not None
        why = "ended"
        try:
            while line := await self._process.stdout.readline():
                self._take(line)
        except _ProtocolError as error:
            why = str(error)
        except ValueError:
            why = f"wrote a line of more than {MAX_LINE_BYTES >> 20} MiB"
        self._why = self._why or why
        kill_group(self._process.pid)
        code = await self._process.wait()
        reaper.remove(self._process.pid)
        await asyncio.wait(self._tasks[1:], timeout=EXIT_TIMEOUT_S)
        if self._why == "ended":
            self._why = f"ended ({describe_exit(code)})"
        self.ended.set()
        for answer in (*self._pending.values(), self._ready):
            if not answer.done():
                answer.set_exception(self.lost())
                answer.exception()  # asyncio must not report it where the caller has left

    async def _read_errors(self) -> None:
        """Keep the end of the guest's standard error, which may have any length."""
        assert self._process is not None and self._process.stderr is not None
        while data := await self._process.stderr.read(1 << 16):
            self._tail += data
            del self._tail[:-TAIL_BYTES]

    def _take(self, line: bytes) -> None:
        """Take one line: the first one, or the answer to a request."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise _ProtocolError(f"wrote a line that is no JSON: {_shown(line)}") from None
        if not isinstance(message, dict):
            raise _ProtocolError(f"wrote a line that is no JSON object: {_shown(line)}")
        if not self._ready.done():
            if message.get("protocol") != PROTOCOL or not {"ready", "refused"} & message.keys():
                raise _ProtocolError(f"speaks another protocol than {PROTOCOL}; its first line is {_shown(line)}")
            self._ready.set_result(message)
            return
        given = message.get("id")
        number = given if isinstance(given, int) else 0  # no request has the number 0
        if number in self._late:
            self._late.discard(number)
            return
        answer = self._pending.get(number)
        if answer is None or answer.done() or not {"result", "error"} & message.keys():
            raise _ProtocolError(f"gave an answer that no request waits for: {_shown(line)}")
        self.has_answered = True
        if "error" in message:
            answer.set_exception(HubError(str(message["error"])))
        else:
            answer.set_result(message["result"])

    # -- sentences -----------------------------------------------------------------------------------------------------

    def lost(self) -> GuestLostError:
        """Return how the guest ended, as an error."""
        return GuestLostError(f"The process that plays {self._spec.title} {self._why}.{self._describe_tail()}")

    def _describe_refusal(self, first: Mapping[str, Any]) -> str:
        title = f"`{self._spec.option}`"
        if first.get("missing"):
            has_pins = (PINS / f"{self._spec.hub}.txt").exists()
            install = f"Install it by `etude env install {self._spec.hub}`" if has_pins else "Install it there"
            return (
                f"{title} needs the package {first['missing']}, which {self._spec.python} does not have. {install}, or "
                f"name a Python that has it by `{self._spec.section}.python`."
            )
        return f"{title} is refused. {first['refused']}"

    def _describe_tail(self) -> str:
        text = self._tail.decode(errors="replace").strip()[-TAIL_CHARACTERS:]
        return f" Its standard error ended with:\n{text}" if text else " It wrote nothing to standard error."


class _ProtocolError(Exception):
    """A line that the protocol does not know; the message is the rest of a sentence about the guest."""


def _shown(line: bytes) -> str:
    """Return the beginning of a line, as a part of a sentence."""
    text = line.decode(errors="replace").strip()
    return repr(text if len(text) <= 200 else f"{text[:200]}…")
