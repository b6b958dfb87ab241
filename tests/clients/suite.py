"""The suite of Python clients: each runs a script in their environment, against one endpoint, and is judged by what the
endpoint recorded.

The model is a table (`tests.agents.proxy.tables`). Its template shows it, by a token, what is asked: it calls a tool
where there are tools and no result yet, counts where it is asked to, and else answers.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from etude.chat import ChatRenderer
from etude.records import Turn
from etude.rollout.python_environments import PackagePins
from tests.agents.proxy.tables import END, START, Table, model_of_table, tokenizer_of
from tests.agents.proxy.world import World, serving
from tests.chat.made import published
from tests.rollout.engines import engine_of
from tests.waits import blocked_until

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
PINS = tuple(line for line in (HERE / "pins.txt").read_text().splitlines() if line and not line.startswith("#"))
PINNED = PackagePins("python-clients", PINS)
CLIENTS: dict[str, tuple[str, ...]] = {
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "litellm": ("litellm",),
    "pydantic_ai": ("pydantic-ai-slim",),
    "openai_agents": ("openai-agents",),
    "langgraph": ("langgraph", "langchain-openai"),
    "autogen": ("autogen-agentchat", "autogen-ext"),
    "smolagents": ("smolagents",),
    "dspy": ("dspy",),
}
"""The packages of each script."""
FEATURES = ("call", "stream", "tools", "exact", "structured", "error", "drop")
ANSWER, NUMBER, SECRET = "It is  done.", "1, ", "heliotrope"
AGAIN, COUNTS = "<|again|>", "<|counts|>"
CONTEXT = 16384
PATIENCE_S = 240


def table() -> Table:
    """Return a table of a call with unusual spacing, an answer, and numbers without an end."""
    call = '\n{"name": "look", "arguments": {"key":"notes"}}\n'
    follows = {one: {other: 1.0} for one, other in pairwise([START, "<tool_call>", call, "</tool_call>", END])}
    return follows | {AGAIN: {ANSWER: 1.0}, ANSWER: {END: 1.0}, COUNTS: {NUMBER: 1.0}, NUMBER: {NUMBER: 1.0}}


@contextmanager
def suite_world() -> Iterator[World]:
    """Serve the endpoint that all clients use."""
    opens = "{{- '<|im_start|>assistant\\n' }}"
    said = (
        "{%- if messages | selectattr('role', 'equalto', 'tool') | list %}{{- '" + AGAIN + "' }}"
        "{%- elif 'for ever' in (messages | last).content %}{{- '" + COUNTS + "' }}"
        "{%- elif not tools %}{{- '" + AGAIN + "' }}{%- endif %}"
    )
    before, after = published()["qwen2_5"].rsplit(opens, 1)
    template = before + opens + said + after
    with TemporaryDirectory(prefix="etude-suite-") as directory:
        tokenizer = tokenizer_of(table(), template, Path(directory))
        with (
            engine_of(model_of_table(table(), tokenizer, CONTEXT), tokenizer, kv_gib=0.1) as engine,
            serving(engine, ChatRenderer(tokenizer), context=CONTEXT, holds_grammars=True) as world,
        ):
            yield world


@dataclass
class Outcome:
    """The result of a client, feature by feature: "yes", the reason that it failed, or "" if it has no such feature."""

    features: Mapping[str, str]

    @property
    def cells(self) -> list[str]:
        """The cells of its row."""
        return [{"": "–"}.get(self.features[name], self.features[name]) for name in FEATURES]


def play(world: World, client: str, python: Path) -> Outcome:
    """Run a client's script, and return its result."""
    claims = {name: world.attempt() for name in FEATURES}
    printed = run_script(world, client, python, {name: claim.model_key for name, claim in claims.items()})
    turns = {name: lambda name=name: world.turns(claims[name].attempt_id) for name in FEATURES}
    found = {name: _judge(name, printed[name], turns[name]) if name in printed else "" for name in FEATURES}
    if found["tools"] == "yes":
        found["exact"] = _judge_exact(world, turns["tools"]())
    return Outcome(found)


def run_script(world: World, client: str, python: Path, keys: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Run the script of a client in an environment without other settings; return what it printed."""
    with TemporaryDirectory(prefix="etude-client-") as home:
        variables = {"PATH": os.environ["PATH"], "HOME": home, "ETUDE_URL": world.root, "ETUDE_KEYS": json.dumps(keys)}
        done = subprocess.run(
            [str(python), str(SCRIPTS / f"play_{client}.py")],
            env=variables,
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    results: dict[str, dict[str, str]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def _judge(feature: str, result: Mapping[str, str], turns: Any) -> str:
    """Return "yes" if a feature came out as it should, else what came instead."""
    said = result.get("value", result.get("error", ""))
    if feature == "error":
        return "yes" if "nobody" in result.get("error", "") and not turns() else f"no: {said[:80]}"
    if "error" in result:
        return f"no: {said[:80]}"
    if feature == "structured":
        (turn,) = turns()
        fits = said in ("red", "blue") and turn.grammar is not None
        return "yes" if fits else f"no: {said[:80]}"
    if feature == "drop":
        blocked_until(lambda: bool(turns()))
        (turn,) = turns()
        return "yes" if turn.completion.finish_reason == "abort" else f"no: {turn.completion.finish_reason}"
    return "yes" if said == ANSWER else f"no: {said[:80]}"


def _judge_exact(world: World, turns: list[Turn]) -> str:
    """Return "yes" if the second prompt begins with all of the first turn, and has the tool's result behind it."""
    first, second = turns
    whole = np.concatenate([first.prompt, first.completion.ids])
    decode = world.endpoint.chat.tokenizer.decode
    continues = np.array_equal(second.prompt[: len(whole)], whole)
    return "yes" if continues and SECRET in decode(second.prompt[len(whole) :]) else "no"
