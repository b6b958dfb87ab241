"""Agents that are programs: coding agents, run as their packages install them against an endpoint, and judged by what
they print and by what the endpoint recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from etude.child_process import kill_group
from etude.store.queue.rollout_queue import Claim
from tests.clients.suite import ANSWER, COLOURS, PINNED, SECRET, UNKNOWN, Outcome, judge_drop, judge_exact
from tests.clients.thinking import Calls, ThinkingWorld, ToolCall, thinking_world
from tests.components import require_clients, require_python_clients
from tests.npm import CODING
from tests.waits import blocked_until

QUESTION, COLOUR, COUNT = "What is in notes.txt?", "Which colour?", "Please count for ever."
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": list(COLOURS)}},
    "required": ["colour"],
    "additionalProperties": False,
}
"""The schema of an answer of a form."""
PATIENCE_S = 120


@dataclass(frozen=True)
class Ask:
    """A question to a program, and the endpoint that it uses."""

    world: ThinkingWorld
    claim: Claim
    directory: Path
    """The working directory, which has notes.txt and is the program's alone."""
    question: str
    model: str
    form: bool = False
    """True wants an answer of the form `SCHEMA`."""

    @property
    def key(self) -> str:
        """The key of the attempt."""
        return self.claim.model_key


@dataclass(frozen=True)
class Start:
    """The words and the environment variables that start a program."""

    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


class Program(Protocol):
    """A coding agent on the command line."""

    title: ClassVar[str]
    """Its name."""
    package: ClassVar[str]
    """The package that installs it, of npm or of PyPI."""
    streams: ClassVar[bool]
    """True if it asks for streams."""
    forms: ClassVar[bool]
    """True if it can be asked for an answer of a form."""

    def calls(self, directory: Path) -> Calls:
        """Return the calls of its tools that its model makes."""
        ...

    def start(self, ask: Ask) -> Start:
        """Return what starts it; write the files that it needs."""
        ...

    def read(self, printed: str, ask: Ask) -> str:
        """Return its answer."""
        ...


class ClaudeCode(Program):
    """Claude Code, by messages."""

    title = "Claude Code"
    package = "@anthropic-ai/claude-code"
    streams = True
    forms = True

    def calls(self, directory: Path) -> Calls:
        read = ToolCall("Read", {"file_path": str(directory / "notes.txt")})
        return Calls(read, form=ToolCall("StructuredOutput", {"colour": "red"}))

    def start(self, ask: Ask) -> Start:
        wrapper = require_clients() / "node_modules" / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
        words = ["node", str(wrapper), "-p", ask.question, "--model", ask.model, "--output-format", "json"]
        variables = {
            "ANTHROPIC_BASE_URL": ask.world.world.root,
            "ANTHROPIC_API_KEY": ask.key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        return Start([*words, *(["--json-schema", json.dumps(SCHEMA)] if ask.form else [])], variables)

    def read(self, printed: str, ask: Ask) -> str:
        result = json.loads(printed.strip().splitlines()[-1])
        return str(result["structured_output"]["colour"] if ask.form else result["result"])


CODEX = """
model = "{model}"
model_provider = "etude"

[model_providers.etude]
name = "Etude"
base_url = "{url}"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""


class Codex(Program):
    """Codex, by responses."""

    title = "Codex"
    package = "@openai/codex"
    streams = True
    forms = True

    def calls(self, directory: Path) -> Calls:
        return Calls(ToolCall("exec_command", {"cmd": "cat notes.txt"}))

    def start(self, ask: Ask) -> Start:
        home = ask.directory / "codex"
        home.mkdir()
        (home / "config.toml").write_text(CODEX.format(url=ask.world.world.url, model=ask.model))
        (home / "schema.json").write_text(json.dumps(SCHEMA))
        script = require_clients() / "node_modules" / "@openai" / "codex" / "bin" / "codex.js"
        words = ["node", str(script), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        form = ["--output-schema", str(home / "schema.json")] if ask.form else []
        return Start([*words, "--json", *form, ask.question], {"CODEX_HOME": str(home), "OPENAI_API_KEY": ask.key})

    def read(self, printed: str, ask: Ask) -> str:
        items = [event["item"] for line in printed.splitlines() if "item" in (event := json.loads(line))]
        assert items[-1]["type"] == "agent_message", items[-1]
        return str(json.loads(items[-1]["text"])["colour"] if ask.form else items[-1]["text"])


class OpenCode(Program):
    """opencode, by chat completions. It also asks for a title, with another prompt."""

    title = "opencode"
    package = "opencode-linux-x64"
    streams = True
    forms = False

    def calls(self, directory: Path) -> Calls:
        return Calls(ToolCall("read", {"filePath": str(directory / "notes.txt")}))

    def start(self, ask: Ask) -> Start:
        binary = require_clients(CODING) / "node_modules" / "opencode-linux-x64" / "bin" / "opencode"
        options = {"baseURL": ask.world.world.url, "apiKey": ask.key}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {ask.model: {}}}
        settings = {"autoupdate": False, "share": "disabled", "provider": {"etude": provider}}
        (ask.directory / "opencode.json").write_text(json.dumps(settings))
        words = [str(binary), "run", "--format", "json", "--model", f"etude/{ask.model}", ask.question]
        return Start(words, {"OPENCODE_DISABLE_MODELS_FETCH": "1"})

    def read(self, printed: str, ask: Ask) -> str:
        events = [json.loads(line) for line in printed.splitlines()]
        (text,) = [event["part"]["text"] for event in events if event["type"] == "text"]
        return str(text)


class QwenCode(Program):
    """Qwen Code, by chat completions."""

    title = "Qwen Code"
    package = "@qwen-code/qwen-code"
    streams = True
    forms = True

    def calls(self, directory: Path) -> Calls:
        read = ToolCall("read_file", {"file_path": str(directory / "notes.txt")})
        return Calls(read, form=ToolCall("structured_output", {"colour": "red"}))

    def start(self, ask: Ask) -> Start:
        script = require_clients(CODING) / "node_modules" / "@qwen-code" / "qwen-code" / "cli-entry.js"
        words = ["node", str(script), "--bare", "--yolo", "--auth-type", "openai", "--model", ask.model]
        form = ["--json-schema", json.dumps(SCHEMA)] if ask.form else []
        variables = {"OPENAI_BASE_URL": ask.world.world.url, "OPENAI_API_KEY": ask.key}
        return Start([*words, *form, "--output-format", "json", ask.question], variables)

    def read(self, printed: str, ask: Ask) -> str:
        result = json.loads(printed)[-1]
        return str(result["structured_result"]["colour"] if ask.form else result["result"])


class MiniSweAgent(Program):
    """mini-swe-agent, by chat completions through LiteLLM. Its model ends a task by a command."""

    title = "mini-swe-agent"
    package = "mini-swe-agent"
    streams = False
    forms = False
    settings: ClassVar[Mapping[str, str]] = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "TYPER_STANDARD_TRACEBACK": "1",
    }
    """The environment variables that keep it from asking, from prices and from long reports of errors."""

    def calls(self, directory: Path) -> Calls:
        submit = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; printf '{ANSWER}'"
        return Calls(ToolCall("bash", {"command": "cat notes.txt"}), last=ToolCall("bash", {"command": submit}))

    def start(self, ask: Ask) -> Start:
        words = [str(require_python_clients(PINNED)), "-m", "minisweagent", "--agent-class", "default"]
        trajectory = str(ask.directory / "trajectory.json")
        return Start(
            [*words, "-m", f"openai/{ask.model}", "-t", ask.question, "-o", trajectory],
            {"OPENAI_BASE_URL": ask.world.world.url, "OPENAI_API_KEY": ask.key, **self.settings},
        )

    def read(self, printed: str, ask: Ask) -> str:
        trajectory = json.loads((ask.directory / "trajectory.json").read_text())
        return str(trajectory["info"]["submission"])


PROGRAMS: dict[str, Program] = {
    "claude_code": ClaudeCode(),
    "codex": Codex(),
    "opencode": OpenCode(),
    "qwen_code": QwenCode(),
    "mini_swe_agent": MiniSweAgent(),
}


def play_program(program: Program, directory: Path) -> Outcome:
    """Run a program once for each question, and return its result."""
    answering = directory / "answering"
    with thinking_world(program.calls(answering)) as world:
        features = play_question(program, world, answering)
        features["structured"] = _play_form(program, world, directory / "form") if program.forms else ""
        features["error"] = _play_error(program, world, directory / "error")
        features["drop"] = _play_drop(program, world, directory / "drop")
    return Outcome(features)


def play_question(program: Program, world: ThinkingWorld, directory: Path) -> dict[str, str]:
    """Ask a program what is in a file: it calls its model, runs a tool, and calls its model again."""
    ask = _ask(world, directory, QUESTION)
    done = _run(program, ask)
    said = program.read(done.stdout, ask) if done.returncode == 0 else done.stdout + done.stderr
    # One of them asks for a title too, by a shorter prompt.
    turns = sorted(world.world.turns(ask.claim.attempt_id), key=lambda turn: len(turn.prompt))[-2:]
    answered = "yes" if said == ANSWER else f"no: {said[-800:]}"
    exact = judge_exact(world.world, turns)
    streamed = "yes" if world.upstream.streamed and not world.upstream.whole else "no"
    return {
        "call": answered,
        "stream": streamed if program.streams else "",
        "tools": answered,
        "exact": exact,
    }


def _play_form(program: Program, world: ThinkingWorld, directory: Path) -> str:
    """Ask for an answer of a form."""
    ask = _ask(world, directory, COLOUR, form=True)
    done = _run(program, ask)
    said = program.read(done.stdout, ask) if done.returncode == 0 else done.stdout + done.stderr
    return "yes" if said in COLOURS else f"no: {said[-800:]}"


def _play_error(program: Program, world: ThinkingWorld, directory: Path) -> str:
    """Name a model that the endpoint does not have."""
    ask = _ask(world, directory, QUESTION, model=UNKNOWN)
    done = _run(program, ask)
    printed = done.stdout + done.stderr
    shown = UNKNOWN in printed and ANSWER not in printed and SECRET not in printed
    return "yes" if shown and not world.world.turns(ask.claim.attempt_id) else f"no: {printed[-800:]}"


def _play_drop(program: Program, world: ThinkingWorld, directory: Path) -> str:
    """Kill a program in the middle of an answer."""
    ask = _ask(world, directory, COUNT)
    before = world.upstream.streamed, world.upstream.whole
    with _started(program, ask) as process:
        blocked_until(lambda: (world.upstream.streamed, world.upstream.whole) != before, PATIENCE_S)
        assert process.poll() is None, "it ended before it had its answer"
    return judge_drop(world.world, ask.claim)


def _ask(world: ThinkingWorld, directory: Path, question: str, model: str = "", form: bool = False) -> Ask:
    """Make a directory for a program, and a new attempt for it."""
    directory.mkdir(parents=True)
    (directory / "notes.txt").write_text(f"The secret is {SECRET}.\n")
    return Ask(world, world.world.attempt(), directory, question, model or world.world.endpoint.model, form)


def _run(program: Program, ask: Ask) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    with _started(program, ask) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def _started(program: Program, ask: Ask) -> Iterator[subprocess.Popen[str]]:
    """Start a program in a home directory of its own, and kill it and all that it has started."""
    start = program.start(ask)
    environment = {"PATH": os.environ["PATH"], "HOME": str(ask.directory.parent / "home"), "TMPDIR": str(ask.directory)}
    Path(environment["HOME"]).mkdir(exist_ok=True)
    process = subprocess.Popen(
        start.words,
        cwd=ask.directory,
        env={**environment, **start.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.communicate()
