"""A command: a program in any language, as an agent.

    etude.command("python agent.py --fast")                      a shell command line
    etude.command(["node", "agent.js"], task="file")             or a list of arguments, without a shell

The program's environment says where the model is (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`,
`ANTHROPIC_API_KEY`), and which attempt it plays (`ETUDE_ROLLOUT`, `ETUDE_ATTEMPT`). The task is a JSON object of its
fields. It comes on standard input, in the file that `ETUDE_TASK_FILE` names, or in `ETUDE_TASK`.

Exit code 0 means success. The last line of standard output may hold the reward, such as `{"reward": 1.0}` or
`{"reward": {"right": 1.0, "short": 0.2}}`. The program may also send it by `etude.emit`, for which it needs the reward
key (`reward_key=True`).

Each program gets its own process group. The whole group is killed when the program exits, when its time is over, or
when its runner has ended. Only a process that moves to another session escapes. The end of the program's output is kept
as the attempt's event `output`.
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
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from etude.agents.agent import Agent, CallSignature, get_llm
from etude.agents.attempt_context import current_attempt
from etude.agents.error_classification import excuse_if_unreachable
from etude.child_process import kill_group, reaper
from etude.config.env import build_program_env
from etude.errors import AgentError
from etude.records import Outcome
from etude.store.queue.rollout_queue import AttemptReport, Claim

TaskInput = Literal["stdin", "file", "env"]

PIPE_CLOSE_TIMEOUT = 2.0
"""Seconds that pipes may stay open after all the program's processes were killed."""
MAX_VARIABLE_BYTES = 100_000
"""The most bytes of a task in an environment variable; Linux allows 128 KiB."""
MAX_OUTPUT_KB = 1024
"""The most kilobytes kept of each output of a run: they go into the journal."""
TAIL_CHARACTERS = 2000
"""Characters of the end of each output that an error quotes."""
_SHELL = ("/bin/sh", "-c")
# The program first reads a line, which is written once the reaper knows its group. So no program runs unknown to it.
_LAUNCH = 'read -r go || exit 125; {limits}exec "$@"'


@dataclass(frozen=True)
class Command(Agent):
    """A program as an agent: `etude.command`."""

    line: str | Sequence[str]
    """A shell command line, or a program and its arguments."""
    _: KW_ONLY
    task: TaskInput = "stdin"
    """The way that the program gets the task: on `stdin`, in a `file`, or in the `env`ironment."""
    reward_key: bool = False
    """True gives the program the key to write rewards and events of its attempt."""
    directory: str | Path | None = None
    """The working directory; None is the runner's."""
    environment: Mapping[str, str] | None = None
    """Additional environment variables."""
    timeout_s: float | None = None  # type: ignore[misc]
    """Seconds that the program may take, if its rollout does not allow less."""
    cpu_s: int | None = None
    """CPU seconds, for each process of the program."""
    memory_mb: int | None = None
    """Megabytes of address space, for each process of the program. Some language runtimes reserve far more than they
    use."""
    output_kb: int = 64
    """Kilobytes kept of the end of standard output, and of standard error."""
    grace_s: float = 2.0  # type: ignore[misc]
    """Seconds between SIGTERM and SIGKILL."""
    max_concurrency: int | None = None  # type: ignore[misc]
    """The most programs that one runner has at once; None leaves it to the runner."""

    def __post_init__(self) -> None:
        if not isinstance(self.line, str):
            object.__setattr__(self, "line", tuple(self.line))
        object.__setattr__(self, "environment", dict(self.environment or {}))
        if not self.argv or not self.argv[0].strip():
            raise AgentError("A command names no program to run. Give one: etude.command('python agent.py').")
        if self.task not in get_args(TaskInput):
            ways = ", ".join(get_args(TaskInput))
            raise AgentError(f"A command gets its task by one of {ways}; task='{self.task}' is none of them.")
        for name in ("timeout_s", "cpu_s", "memory_mb", "output_kb", "grace_s", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise AgentError(f"A command's {name} must be above 0; it is {value!r}.")
        if self.output_kb > MAX_OUTPUT_KB:
            raise AgentError(f"A command's output_kb must be at most {MAX_OUTPUT_KB}; it is {self.output_kb}.")
        owned = [name for name in self.environment or () if name.startswith("ETUDE_")]
        if owned:
            raise AgentError(
                f"A command's environment has {', '.join(owned)}. Names that begin with ETUDE_ are set by Etude."
            )
        if self.directory is not None:  # another process may have another working directory
            object.__setattr__(self, "directory", Path(self.directory).expanduser().absolute())

    @property
    def argv(self) -> tuple[str, ...]:
        """The program and its arguments."""
        if isinstance(self.line, str):
            return (*_SHELL, self.line) if self.line.strip() else ()
        return tuple(self.line)

    @property
    def title(self) -> str:
        return " ".join(self.argv[2:] if self.argv[:2] == _SHELL else self.argv)

    def call_signature(self) -> CallSignature:
        return CallSignature(("claim", "store_url"), is_async=True)

    def setup(self) -> None:
        """Refuse a program that cannot be run, before the runner claims anything for it."""
        directory = Path(self.directory or Path.cwd())
        if not directory.is_dir():
            raise AgentError(f"its directory {directory} does not exist")
        search_path = build_program_env(self.environment or {}).get("PATH")
        program = self.argv[0]
        if shutil.which(str(directory / program) if os.sep in program else program, path=search_path) is None:
            raise AgentError(f"the program {program} was not found, or it is not executable")

    async def run(self, claim: Claim, store_url: str) -> AttemptReport:
        if self.reward_key and not store_url:
            return AttemptReport(
                Outcome.INFRA_ERROR,
                f"The command {self.title} has reward_key=True, but the store has no server that takes rewards. "
                "Serve the store, or have the program print its reward in its last line.",
            )
        text = json.dumps(dict(claim.task.fields), ensure_ascii=False)
        if self.task == "env" and len(text.encode()) > MAX_VARIABLE_BYTES:
            return AttemptReport(
                Outcome.FAILED,
                f"Task {claim.task.ordinal} has more than {MAX_VARIABLE_BYTES} bytes, the most that an environment "
                "variable holds. Give the command its tasks by `stdin` or in a `file`.",
            )
        with tempfile.TemporaryDirectory(prefix="etude-task-", ignore_cleanup_errors=True) as directory:
            variables = self._variables(claim, store_url)
            if self.task == "env":
                variables["ETUDE_TASK"] = text
            elif self.task == "file":
                variables["ETUDE_TASK_FILE"] = str(Path(directory) / "task.json")
                (Path(directory) / "task.json").write_text(text, encoding="utf-8")
            run = _CommandRun(
                self, build_program_env({**(self.environment or {}), **variables}), text if self.task == "stdin" else ""
            )
            try:
                exit_code = await run.run()
            except asyncio.CancelledError as error:
                error.add_note(run.tails())
                raise
            finally:
                run.record_output()
        return await excuse_if_unreachable(self._make_report(exit_code, run), claim.resources)

    def _variables(self, claim: Claim, store_url: str) -> dict[str, str]:
        variables = {"ETUDE_ROLLOUT": str(claim.attempt_id.rollout), "ETUDE_ATTEMPT": str(claim.attempt_id.attempt)}
        llm = get_llm(claim)
        if llm is not None:
            variables |= {
                "OPENAI_BASE_URL": llm.base_url,
                "OPENAI_API_KEY": llm.api_key,
                "ANTHROPIC_BASE_URL": llm.base_url.removesuffix("/").removesuffix("/v1"),
                "ANTHROPIC_API_KEY": llm.api_key,
                "ETUDE_MODEL": llm.model,
            }
        if self.reward_key:
            variables |= {"ETUDE_STORE_URL": store_url, "ETUDE_REWARD_KEY": claim.reward_key}
        return variables

    def _make_report(self, exit_code: int, run: _CommandRun) -> AttemptReport:
        """Return the report that the exit code and the last line of output give."""
        if exit_code != 0:
            return AttemptReport(
                Outcome.FAILED, f"The command {self.title} ended with {self._describe_exit(exit_code)}. {run.tails()}"
            )
        return AttemptReport(Outcome.SUCCEEDED, reward=_reward_in_last_line(run.output.text()))

    def _describe_exit(self, exit_code: int) -> str:
        number = -exit_code if exit_code < 0 else exit_code - 128  # a shell returns 128 plus the signal's number
        if number == signal.SIGXCPU:
            return f"its limit of cpu_s={self.cpu_s} CPU seconds used up"
        return f"exit code {exit_code}" if exit_code >= 0 else f"the signal {signal.Signals(number).name}"


command = Command


class _Tail:
    """The end of a program's output, which may have any length."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self.dropped = 0

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read until the stream ends."""
        while data := await stream.read(1 << 16):
            self._buffer += data
            excess = len(self._buffer) - self._max_bytes
            if excess > 0:
                del self._buffer[:excess]
                self.dropped += excess

    def text(self) -> str:
        """Return the part that is kept."""
        return self._buffer.decode(errors="replace")


class _CommandRun:
    """One run of a command."""

    def __init__(self, command: Command, environment: Mapping[str, str], text: str) -> None:
        self._command = command
        self._environment = environment
        self._text = text
        self.output = _Tail(command.output_kb << 10)
        self.errors = _Tail(command.output_kb << 10)

    async def run(self) -> int:
        """Run the program to its end, and kill all that it started. Return its exit code, or minus the number of its
        signal."""
        process, loop = self._start(), asyncio.get_running_loop()
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            program_input, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
            program_input.write(f"go\n{self._text}".encode())
            program_input.close()  # takes effect once all is written; the program may leave it unread
            outputs = [await _stream_reader(process.stdout), await _stream_reader(process.stderr)]
            tails = (self.output, self.errors)
            readers = [asyncio.create_task(tail.read(reader)) for tail, (reader, _) in zip(tails, outputs, strict=True)]
            exited = _exit_future(process, loop)
            try:
                await asyncio.shield(exited)
            except asyncio.CancelledError:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGTERM)
                await asyncio.wait({exited}, timeout=self._command.grace_s)
                raise
            finally:
                kill_group(process.pid)
                await asyncio.wait(readers, timeout=PIPE_CLOSE_TIMEOUT)
                for reader, (_, transport) in zip(readers, outputs, strict=True):
                    reader.cancel()
                    transport.close()
                if program_input.get_write_buffer_size():
                    program_input.abort()
        finally:
            kill_group(process.pid)
            reaper.remove(process.pid)
            process.wait()
        return process.returncode

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the program, which waits for its first line, in a group that the reaper knows."""
        command, limits = self._command, []
        if command.cpu_s is not None:  # the soft limit is below the hard one, so that its signal is recognized
            limits += [f"-S -t {command.cpu_s}", f"-H -t {command.cpu_s + 2}"]
        if command.memory_mb is not None:
            limits.append(f"-v {command.memory_mb << 10}")
        script = _LAUNCH.format(limits="".join(f"ulimit {limit} || exit 125; " for limit in limits))
        process = subprocess.Popen(
            [*_SHELL, script, "etude", *command.argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(self._environment),
            cwd=command.directory,
            start_new_session=True,
        )
        reaper.add(process.pid)
        return process

    def tails(self) -> str:
        """Return the ends of both outputs as sentences: the cause may be in either."""
        outputs = {"standard output": self.output.text(), "standard error": self.errors.text()}
        tails = {name: text.strip()[-TAIL_CHARACTERS:] for name, text in outputs.items()}
        sentences = [f"Its {name} ended with:\n{text}" for name, text in tails.items() if text]
        return "\n".join(sentences) or "It wrote nothing to standard output or standard error."

    def record_output(self) -> None:
        """Record the output as an event of the attempt."""
        data: dict[str, Any] = {}
        for name, tail in (("stdout", self.output), ("stderr", self.errors)):
            if text := tail.text():
                data[name] = text
                if tail.dropped:
                    data[f"{name}_dropped_bytes"] = tail.dropped
        context = current_attempt()
        if data and context is not None:
            context.emit(lambda queue, attempt_id: queue.record_note(attempt_id, "output", data))


async def _stream_reader(pipe: IO[bytes]) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader, transport


def _exit_future(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
    """Return a future that is done when the program has exited, even if other processes hold its pipes. If the system
    allows, the process stays a zombie until `wait`, so that its group's number cannot go to another group."""
    exited: asyncio.Future[None] = loop.create_future()

    def set_exited() -> None:
        if not exited.done():
            exited.set_result(None)

    def wait_for_exit() -> None:
        if hasattr(os, "waitid"):
            with suppress(ChildProcessError):  # the process was waited for already
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            loop.call_soon_threadsafe(set_exited)

    threading.Thread(target=wait_for_exit, name="etude-command", daemon=True).start()
    return exited


def _reward_in_last_line(text: str) -> Any:
    """Return the reward in the last line of a program's output; None if that line holds no reward."""
    line = text.rstrip().rpartition("\n")[2].strip()
    if not line.startswith("{"):
        return None
    with suppress(ValueError):
        parsed = json.loads(line)
        if isinstance(parsed, dict):
            return parsed.get("reward")
    return None
