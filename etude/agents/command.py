"""A command: any program, in any language, as an agent.

    etude.command("python agent.py --fast")                      as a shell takes it
    etude.command(["node", "agent.js"], task="file")             or in words, as it stands

Its environment says where the model is (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`)
and which attempt it plays (`ETUDE_ROLLOUT`, `ETUDE_ATTEMPT`); the task, a JSON object of its fields, comes on its
standard input, in the file that `ETUDE_TASK_FILE` names, or in `ETUDE_TASK`. Exit code 0 is success. What it earned may
stand in the last line of its output, `{"reward": 1.0}` or `{"reward": {"right": 1.0, "short": 0.2}}`; or it is told by
`etude.emit`, for which the program needs the key (`reward_key=True`).

The program has a process group of its own. With its end, or when its time is over, or its runner gone, that is gone
too, whatever the program started; only what moves to a session of its own escapes. What it writes is kept, within
bounds, as the attempt's event `output`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, get_args

from etude.agents.agent import Agent, CallSignature, get_llm
from etude.agents.attempt_context import current_attempt
from etude.agents.error_classification import excuse_if_unreachable
from etude.agents.process_reaper import ProcessReaper
from etude.config.env import build_program_env
from etude.errors import AgentError
from etude.records import Outcome
from etude.store.rollout_queue import AttemptReport, Claim

__all__ = ["Command", "command", "reaper"]

TaskInput = Literal["stdin", "file", "env"]

CLOSING = 2.0
"""Seconds that pipes may stay open once all that the program started is killed."""
LONGEST_VARIABLE = 100_000
"""Bytes of a task that an environment variable holds; Linux allows 128 KiB."""
MOST_OUTPUT = 1024
"""Kilobytes of each kind of output that may be kept of a run: they go into the journal."""
TAIL = 2000
"""Characters of the end of each output that an error holds."""
# The program begins when its group is known to the guard, or never: it first reads a line that only then is written.
_BEGIN = 'read -r go || exit 125; {limits}exec "$@"'
reaper = ProcessReaper()
"""Of this process: it ends commands, and whoever else is told to it, when this process has ended."""


@dataclass(frozen=True, kw_only=True)
class Command(Agent):
    """A program as an agent."""

    argv: tuple[str, ...]
    """The program and its arguments."""
    task: TaskInput = "stdin"
    """How it is given the task: on `stdin`, in a `file`, or in the `env`ironment."""
    reward_key: bool = False
    """Whether it is given the key to write rewards and events of its attempt."""
    directory: Path | None = None
    """Where it runs; None is where its runner does."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What else is in its environment."""
    timeout_s: float | None = None  # type: ignore[misc]
    """Seconds that it may take, where its rollout does not allow less."""
    cpu_s: int | None = None
    """Seconds of a processor, for each of its processes."""
    memory_mb: int | None = None
    """Megabytes of address space, for each of its processes; some languages reserve a lot that they never use."""
    output_kb: int = 64
    """Kilobytes kept of the end of what it writes, to standard output and to standard error each."""
    grace_s: float = 2.0  # type: ignore[misc]
    """Seconds that it has to end once it is asked to, by SIGTERM; then it is killed."""
    max_concurrency: int | None = None  # type: ignore[misc]
    """How many of it one runner has at once; None leaves it to the runner."""

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0].strip():
            raise AgentError("A command was given nothing to run; name a program: etude.command('python agent.py').")
        if self.task not in get_args(TaskInput):
            ways = ", ".join(get_args(TaskInput))
            raise AgentError(f"A command is given its task by one of {ways}; '{self.task}' was asked for.")
        for name in ("timeout_s", "cpu_s", "memory_mb", "output_kb", "grace_s", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise AgentError(f"A command's {name} must be above 0; {value!r} was given.")
        if self.output_kb > MOST_OUTPUT:
            raise AgentError(f"A command's output_kb is at most {MOST_OUTPUT}; {self.output_kb} was given.")
        owned = [name for name in self.environment if name.startswith("ETUDE_")]
        if owned:
            raise AgentError(f"A command's environment holds {', '.join(owned)}; names with ETUDE_ are Etude's to set.")

    @property
    def title(self) -> str:
        return " ".join(self.argv[2:] if self.argv[:2] == _SHELL else self.argv)

    def call_signature(self) -> CallSignature:
        return CallSignature(("claim", "store_url"), is_async=True)

    def setup(self) -> None:
        """Refuse what cannot be run, before anything is claimed for it."""
        if self.directory is not None and not self.directory.is_dir():
            raise AgentError(f"there is no directory {self.directory}")
        path = build_program_env(self.environment).get("PATH")
        where = self.directory or Path.cwd()
        name = self.argv[0]
        if shutil.which(str(where / name) if os.sep in name else name, path=path) is None:
            raise AgentError(f"there is no program {name} to be found, or it may not be run")

    async def run(self, claim: Claim, store_url: str) -> AttemptReport:
        """Run the program once."""
        if self.reward_key and not store_url:
            return AttemptReport(
                Outcome.INFRA_ERROR,
                f"The command {self.title} is to be given the key to write rewards, and no server of the store is "
                "there to write them to. Serve it, or have the program print its reward in its last line.",
            )
        text = json.dumps(dict(claim.task.fields), ensure_ascii=False)
        if self.task == "env" and len(text.encode()) > LONGEST_VARIABLE:
            return AttemptReport(
                Outcome.FAILED,
                f"Task {claim.task.ordinal} has more than {LONGEST_VARIABLE} bytes, which no environment variable "
                "holds. Give the command its tasks by `stdin` or in a `file`.",
            )
        with tempfile.TemporaryDirectory(prefix="etude-task-", ignore_cleanup_errors=True) as place:
            added = self._variables(claim, store_url)
            if self.task == "env":
                added["ETUDE_TASK"] = text
            elif self.task == "file":
                added["ETUDE_TASK_FILE"] = str(Path(place) / "task.json")
                (Path(place) / "task.json").write_text(text, encoding="utf-8")
            run = _CommandRun(
                self, build_program_env({**self.environment, **added}), text if self.task == "stdin" else ""
            )
            try:
                code = await run.run()
            except asyncio.CancelledError as error:
                error.add_note(run.tails())
                raise
            finally:
                run.record_output()
        return await excuse_if_unreachable(self._make_report(code, run), claim.resources)

    def _variables(self, claim: Claim, store_url: str) -> dict[str, str]:
        added = {"ETUDE_ROLLOUT": str(claim.attempt_id.rollout), "ETUDE_ATTEMPT": str(claim.attempt_id.attempt)}
        llm = get_llm(claim)
        if llm is not None:
            added |= {
                "OPENAI_BASE_URL": llm.base_url,
                "OPENAI_API_KEY": llm.api_key,
                "ANTHROPIC_BASE_URL": llm.base_url.removesuffix("/").removesuffix("/v1"),
                "ANTHROPIC_API_KEY": llm.api_key,
                "ETUDE_MODEL": llm.model,
            }
        if self.reward_key:
            added |= {"ETUDE_STORE_URL": store_url, "ETUDE_REWARD_KEY": claim.reward_key}
        return added

    def _make_report(self, code: int, run: _CommandRun) -> AttemptReport:
        """What its exit code and its last line say."""
        if code != 0:
            return AttemptReport(
                Outcome.FAILED, f"The command {self.title} ended with {self._describe_exit(code)}. {run.tails()}"
            )
        return AttemptReport(Outcome.SUCCEEDED, reward=_reward_in_last_line(run.output.text()))

    def _describe_exit(self, code: int) -> str:
        number = -code if code < 0 else code - 128  # a shell tells a child's signal by 128 and its number
        if number == signal.SIGXCPU:
            return f"all of its cpu_s={self.cpu_s} seconds of a processor used up"
        return f"exit code {code}" if code >= 0 else f"the signal {signal.Signals(number).name}"


_SHELL = ("/bin/sh", "-c")


def command(
    line: str | Sequence[str],
    *,
    task: TaskInput = Command.task,
    reward_key: bool = Command.reward_key,
    directory: str | Path | None = Command.directory,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = Command.timeout_s,
    cpu_s: int | None = Command.cpu_s,
    memory_mb: int | None = Command.memory_mb,
    output_kb: int = Command.output_kb,
    grace_s: float = Command.grace_s,
    max_concurrency: int | None = Command.max_concurrency,
) -> Command:
    """A program as an agent: a line that a shell takes, or a program and its arguments. `Command` says what the options
    mean."""
    return Command(
        argv=(*_SHELL, line) if isinstance(line, str) and line.strip() else tuple([line] if line == "" else line),
        task=task,
        reward_key=reward_key,
        directory=None if directory is None else Path(directory).expanduser().absolute(),
        environment=dict(environment or {}),
        timeout_s=timeout_s,
        cpu_s=cpu_s,
        memory_mb=memory_mb,
        output_kb=output_kb,
        grace_s=grace_s,
        max_concurrency=max_concurrency,
    )


class _Tail:
    """The end of what a program writes, of any length."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = bytearray()
        self.dropped = 0

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Until nothing more comes."""
        while data := await stream.read(1 << 16):
            self._kept += data
            over = len(self._kept) - self._most
            if over > 0:
                del self._kept[:over]
                self.dropped += over

    def text(self) -> str:
        """What is kept of it."""
        return self._kept.decode(errors="replace")


class _CommandRun:
    """One run of a command."""

    def __init__(self, command: Command, environment: Mapping[str, str], text: str) -> None:
        self._command, self._environment, self._text = command, environment, text
        self.output, self.errors = _Tail(command.output_kb << 10), _Tail(command.output_kb << 10)

    async def run(self) -> int:
        """Run it to its end, and end all that it started; its exit code, or minus the number of the signal."""
        process, loop = self._start(), asyncio.get_running_loop()
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            feed, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
            feed.write(f"go\n{self._text}".encode())
            feed.close()  # once all is written; the program need not read it
            outputs = [await _reader(process.stdout), await _reader(process.stderr)]
            kept = (self.output, self.errors)
            readers = [asyncio.create_task(tail.read(reader)) for tail, (reader, _) in zip(kept, outputs, strict=True)]
            ended = _exit_future(process, loop)
            try:
                await asyncio.shield(ended)
            except asyncio.CancelledError:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGTERM)
                await asyncio.wait({ended}, timeout=self._command.grace_s)
                raise
            finally:
                _kill(process)
                await asyncio.wait(readers, timeout=CLOSING)
                for reader, (_, transport) in zip(readers, outputs, strict=True):
                    reader.cancel()
                    transport.close()
                if feed.get_write_buffer_size():
                    feed.abort()
        finally:
            _kill(process)
            reaper.remove(process.pid)
            process.wait()
        return process.returncode

    def _start(self) -> subprocess.Popen[bytes]:
        """The program, which waits for its first line, in a group that the guard knows."""
        asked = self._command
        limits = "".join(f"ulimit {each} || exit 125; " for each in _limits(asked.cpu_s, asked.memory_mb))
        process = subprocess.Popen(
            ["/bin/sh", "-c", _BEGIN.format(limits=limits), "etude", *asked.argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(self._environment),
            cwd=asked.directory,
            start_new_session=True,
        )
        reaper.add(process.pid)
        return process

    def tails(self) -> str:
        """The ends of both outputs, in sentences: a cause may stand in either."""
        written = {"standard output": self.output.text(), "standard error": self.errors.text()}
        ends = {name: text.strip()[-TAIL:] for name, text in written.items()}
        told = [f"Its {name} ended with:\n{text}" for name, text in ends.items() if text]
        return "\n".join(told) or "It wrote nothing to standard output or standard error."

    def record_output(self) -> None:
        """Keep what it wrote."""
        told: dict[str, Any] = {}
        for name, tail in (("stdout", self.output), ("stderr", self.errors)):
            if text := tail.text():
                told[name] = text
                if tail.dropped:
                    told[f"{name}_dropped_bytes"] = tail.dropped
        scope = current_attempt()
        if told and scope is not None:
            scope.emit(lambda desk, key: desk.record_note(key, "output", told))


async def _reader(pipe: IO[bytes]) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader, transport


def _exit_future(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
    """Done when the program has ended, whoever still holds its pipes. Where the system can, its number stays taken, so
    that no other group is killed in its place."""
    ended: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    def watch() -> None:
        if hasattr(os, "waitid"):
            with suppress(ChildProcessError):  # it was waited for after all, and is gone
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with suppress(RuntimeError):  # a loop that is closed has nobody who waits
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=watch, name="etude-command", daemon=True).start()
    return ended


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _limits(cpu_s: int | None, memory_mb: int | None) -> list[str]:
    """What the shell's `ulimit` is given. The soft limit on seconds is below the hard one, so that it is told apart."""
    limits = [] if cpu_s is None else [f"-S -t {cpu_s}", f"-H -t {cpu_s + 2}"]
    return limits if memory_mb is None else [*limits, f"-v {memory_mb << 10}"]


def _reward_in_last_line(text: str) -> Any:
    """What the last line of a program's output says that it earned; None where it says nothing of the kind."""
    line = text.rstrip().rpartition("\n")[2].strip()
    if not line.startswith("{"):
        return None
    with suppress(ValueError):
        told = json.loads(line)
        if isinstance(told, dict):
            return told.get("reward")
    return None
