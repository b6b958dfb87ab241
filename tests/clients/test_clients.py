"""Popular agents run against the endpoint as npm installs them. Each calls the model, the model calls one of its tools,
and the next turn begins with the exact ids of the first.

The model is a real one in a real engine. Its weights are a table of the tokens that follow each token (`tables`):
before a tool has answered it thinks and calls one, and after that it answers. No template would give its calls this
spacing.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from etude.chat import ChatRenderer
from etude.records import SamplingParams, Turn
from tests.agents.proxy.tables import END, START, Table, model_of_table, tokenizer_of
from tests.agents.proxy.world import World, serving
from tests.chat.made import published
from tests.components import require_clients
from tests.npm import CODING
from tests.rollout.engines import engine_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CONTEXT = 65536
SECRET, ANSWER = "heliotrope", "It is  done."
AGAIN = "<|again|>"
"""A token in the prompt before the model answers a tool's result: the next token depends on the last one alone."""
PATIENCE_S = 120


@cache
def corpus() -> tuple[str, ...]:
    """Return English text for the tokenizer's pieces, because the prompts of these agents are long."""
    return tuple(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))


def table_of(name: str, arguments: Mapping[str, Any]) -> Table:
    """Return a table of a thought, a call, and an answer at the end."""
    call = f'\n{{ "arguments":{json.dumps(arguments, separators=(" ,", ":  "))} ,"name":"{name}"}}'
    steps = [START, "<think>", "I ", " look.", "</think>", "\n\n", "<tool_call>", call, "</tool_call>", END]
    follows = {one: {other: 1.0} for one, other in pairwise(steps)}
    return follows | {AGAIN: {ANSWER: 1.0}, ANSWER: {END: 1.0}}


@contextmanager
def playing(name: str, arguments: Mapping[str, Any]) -> Iterator[World]:
    """Serve an endpoint whose model calls this tool."""
    opens = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking"
    instruction = (
        f"{{%- if messages | selectattr('role', 'equalto', 'tool') | list %}}{{{{- '{AGAIN}' }}}}{{%- endif %}}"
    )
    template = published()["qwen3"]
    assert opens in template
    template = template.replace(opens, opens.replace("\n    {%- if", f"\n    {instruction}\n    {{%- if"))
    table = table_of(name, arguments)
    with TemporaryDirectory(prefix="etude-clients-") as directory:
        tokenizer = tokenizer_of(table, template, Path(directory), corpus=corpus(), size=4000)
        model = model_of_table(table, tokenizer, CONTEXT)
        with (
            engine_of(model, tokenizer, kv_gib=0.1, max_num_batched_tokens=4096) as engine,
            serving(engine, ChatRenderer(tokenizer), context=CONTEXT, train=SamplingParams(max_tokens=80)) as world,
        ):
            yield world


def ran(command: list[str], directory: Path, **variables: str) -> str:
    """Return the output of a client that runs in a separate home directory."""
    home = directory / "home"
    home.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(directory), **variables}
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def assert_exact(world: World, turns: list[Turn]) -> None:
    """Assert that there are two turns, a tool call and an answer to its result, and that the second prompt begins with
    all of the first turn."""
    first, second = turns[0], turns[-1]
    decode = world.endpoint.chat.tokenizer.decode
    whole = np.concatenate([first.prompt, first.completion.ids])
    assert "<tool_call>" in decode(first.completion.ids, keep_special_tokens=True)
    assert np.array_equal(second.prompt[: len(whole)], whole)
    assert SECRET in decode(second.prompt[len(whole) :]) and SECRET not in decode(whole)
    assert second.completion.text == ANSWER
    metrics = world.endpoint.metrics()
    assert metrics["endpoint/turns_continued"] == len(turns) - 1 and "endpoint/turns_branched" not in metrics
    assert metrics["endpoint/tokens_rerendered"] > 0, "rendered anew, it would have been other tokens"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A directory with a file that has the secret."""
    (tmp_path / "notes.txt").write_text(f"The secret is {SECRET}.\n")
    return tmp_path


@pytest.mark.smoke
def test_claude_code_continues_its_turns_exactly(notes: Path) -> None:
    clients = require_clients()
    command = ["node", str(clients / "node_modules" / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs")]
    with playing("Read", {"file_path": str(notes / "notes.txt")}) as world:
        claim = world.attempt()
        printed = ran(
            [*command, "-p", "What is in notes.txt?", "--model", world.endpoint.model, "--output-format", "json"],
            notes,
            ANTHROPIC_BASE_URL=world.root,
            ANTHROPIC_API_KEY=claim.model_key,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_TELEMETRY="1",
            DISABLE_AUTOUPDATER="1",
        )
        result = json.loads(printed.strip().splitlines()[-1])
        assert result["result"] == ANSWER and result["num_turns"] == 2 and not result["is_error"], printed
        assert_exact(world, world.turns(claim.attempt_id))


CODEX = """
model = "policy"
model_provider = "etude"

[model_providers.etude]
name = "Etude"
base_url = "{url}"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""


@pytest.mark.smoke
def test_codex_continues_its_turns_exactly(notes: Path) -> None:
    clients = require_clients()
    command = ["node", str(clients / "node_modules" / "@openai" / "codex" / "bin" / "codex.js"), "exec"]
    with playing("exec_command", {"cmd": "cat notes.txt"}) as world:
        claim = world.attempt()
        (notes / "codex").mkdir()
        (notes / "codex" / "config.toml").write_text(CODEX.format(url=world.url))
        printed = ran(
            [
                *command,
                "--skip-git-repo-check",
                "--dangerously-bypass-approvals-and-sandbox",
                "--json",
                "What is in notes.txt?",
            ],
            notes,
            CODEX_HOME=str(notes / "codex"),
            OPENAI_API_KEY=claim.model_key,
        )
        items = [event["item"] for line in printed.splitlines() if "item" in (event := json.loads(line))]
        assert items[-1]["type"] == "agent_message" and items[-1]["text"] == ANSWER
        assert_exact(world, world.turns(claim.attempt_id))


def test_opencode_continues_its_turns_exactly(notes: Path) -> None:
    """It also asks for a title, with another prompt."""
    binary = require_clients(CODING) / "node_modules" / "opencode-linux-x64" / "bin" / "opencode"
    with playing("read", {"filePath": str(notes / "notes.txt")}) as world:
        claim = world.attempt()
        options = {"baseURL": world.url, "apiKey": claim.model_key}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {world.endpoint.model: {}}}
        settings = {"autoupdate": False, "share": "disabled", "provider": {"etude": provider}}
        (notes / "opencode.json").write_text(json.dumps(settings))
        printed = ran(
            [
                str(binary),
                "run",
                "--format",
                "json",
                "--model",
                f"etude/{world.endpoint.model}",
                "What is in notes.txt?",
            ],
            notes,
            OPENCODE_DISABLE_MODELS_FETCH="1",
        )
        texts = [
            event["part"]["text"] for line in printed.splitlines() if (event := json.loads(line))["type"] == "text"
        ]
        assert texts == [ANSWER]
        turns = sorted(world.turns(claim.attempt_id), key=lambda turn: len(turn.prompt))
        assert_exact(world, turns[1:])


@pytest.mark.parametrize("dialect", ["responses", "chat"])
@pytest.mark.parametrize("streamed", [False, True])
def test_vercel_ai_continues_its_turns_exactly(notes: Path, dialect: str, streamed: bool) -> None:
    clients = require_clients()
    (notes / "node_modules").symlink_to(clients / "node_modules")
    script = notes / "agent.mjs"
    script.write_bytes((Path(__file__).parent / "vercel.mjs").read_bytes())
    with playing("look", {"key": "notes"}) as world:
        claim = world.attempt()
        printed = ran(
            ["node", str(script), dialect, "streamed" if streamed else "whole"],
            notes,
            OPENAI_BASE_URL=world.url,
            OPENAI_API_KEY=claim.model_key,
        )
        assert json.loads(printed) == {"text": ANSWER, "steps": 2}
        assert_exact(world, world.turns(claim.attempt_id))
