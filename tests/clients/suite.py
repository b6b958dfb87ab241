"""The suite of Python clients: each runs a script in their environment, against one endpoint, and is judged by what the
endpoint recorded.

The model is a table (`tests.agents.proxy.tables`). Its template shows it, by a token, what is asked: it calls a tool
where there are tools and no result yet, by code where an agent wants code, counts where it is asked to, and else
answers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
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
from etude.store.queue.rollout_queue import Claim
from tests.agents.proxy.tables import END, START, Table, model_of_table, tokenizer_of
from tests.agents.proxy.world import World, serving
from tests.chat.made import published
from tests.rollout.engines import engine_of
from tests.waits import blocked_until

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
PINS = tuple(line for line in (HERE / "pins.txt").read_text().splitlines() if line and not line.startswith("#"))
PINNED = PackagePins("python-clients", PINS, ("mini-swe-agent",))
SDK_APIS = ("responses", "chat")
"""The APIs of OpenAI that the AI SDK is run with; the first is its default."""
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
UNKNOWN = "nobody"
"""A model that the endpoint does not have."""
COLOURS = ("red", "blue")
"""The answers of the form that is asked for."""
AGAIN, COUNTS = "<|again|>", "<|counts|>"
PIECES = {
    "<|looks|>": '<code>\nprint( look("notes") )\n</code>',
    "<|finishes|>": f'<code>\nfinal_answer( "{ANSWER}")\n</code>',
}
"""The code of an agent that calls its tools by code: before a tool has answered, and after it."""
CALLS = ("<tool_call>", "<code>")
"""The beginnings of calls."""
CONTEXT = 16384
PATIENCE_S = 240


def table() -> Table:
    """Return a table of a call with unusual spacing, an answer, numbers without an end, and two pieces of code."""
    call = '\n{"name": "look", "arguments": {"key":"notes"}}\n'
    follows = {one: {other: 1.0} for one, other in pairwise([START, "<tool_call>", call, "</tool_call>", END])}
    ends = {text: {END: 1.0} for text in (ANSWER, *PIECES.values())}
    shown = {mark: {code: 1.0} for mark, code in PIECES.items()}
    return follows | ends | shown | {AGAIN: {ANSWER: 1.0}, COUNTS: {NUMBER: 1.0}, NUMBER: {NUMBER: 1.0}}


@contextmanager
def suite_world() -> Iterator[World]:
    """Serve the endpoint that all clients use."""
    opens = "{{- '<|im_start|>assistant\\n' }}"
    looks, finishes = PIECES
    said = (
        "{%- if messages | selectattr('role', 'equalto', 'tool') | list %}{{- '" + AGAIN + "' }}"
        "{%- elif 'for ever' in (messages | last).content %}{{- '" + COUNTS + "' }}"
        "{%- elif 'Observation:' in (messages | last).content %}{{- '" + finishes + "' }}"
        "{%- elif '<code>' in (messages | first).content %}{{- '" + looks + "' }}"
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


def play_client(world: World, client: str, python: Path) -> Outcome:
    """Run the script of a client of PyPI, and return its result."""
    return play(world, [str(python), str(SCRIPTS / f"play_{client}.py")])


def play_ai_sdk(world: World, api: str, modules: Path) -> Outcome:
    """Run the script of the AI SDK with an API of OpenAI, beside the packages of npm, and return its result."""
    with TemporaryDirectory(prefix="etude-ai-sdk-") as directory:
        (Path(directory) / "node_modules").symlink_to(modules / "node_modules")
        script = shutil.copy(SCRIPTS / "play_ai_sdk.mjs", directory)
        return play(world, ["node", str(script), api])


def play(world: World, words: Sequence[str]) -> Outcome:
    """Run a script, and return the result of its client."""
    claims = {name: world.attempt() for name in FEATURES}
    printed = _run_script(world, words, {name: claim.model_key for name, claim in claims.items()})
    found = {name: _judge(name, printed[name], world, claims[name]) if name in printed else "" for name in FEATURES}
    if found["tools"] == "yes":
        found["exact"] = judge_exact(world, world.turns(claims["tools"].attempt_id))
    return Outcome(found)


def _run_script(world: World, words: Sequence[str], keys: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Run a script in an environment without other settings; return what it printed."""
    with TemporaryDirectory(prefix="etude-client-") as home:
        variables = {"PATH": os.environ["PATH"], "HOME": home, "ETUDE_URL": world.root, "ETUDE_KEYS": json.dumps(keys)}
        done = subprocess.run(
            words,
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


def _judge(feature: str, result: Mapping[str, str], world: World, claim: Claim) -> str:
    """Return "yes" if a feature came out as it should, else what came instead."""
    said = result.get("value", result.get("error", ""))
    if feature == "error":
        shown = UNKNOWN in result.get("error", "") and not world.turns(claim.attempt_id)
        return "yes" if shown else f"no: {said[:80]}"
    if "error" in result:
        return f"no: {said[:80]}"
    if feature == "structured":
        (turn,) = world.turns(claim.attempt_id)
        fits = said in COLOURS and turn.grammar is not None
        return "yes" if fits else f"no: {said[:80]}"
    if feature == "drop":
        return judge_drop(world, claim)
    return "yes" if said == ANSWER else f"no: {said[:80]}"


def judge_drop(world: World, claim: Claim) -> str:
    """Return "yes" if an answer that its client left is recorded: the tokens of a stream, or that one was left."""
    name = claim.attempt_id

    def aborted_calls() -> list[Any]:
        return [note for note in world.notes(name) if note["name"] == "aborted"]

    blocked_until(lambda: world.turns(name) or aborted_calls())
    reasons = {turn.completion.finish_reason for turn in world.turns(name)}
    return "yes" if reasons <= {"abort"} else f"no: {reasons}"


def judge_exact(world: World, turns: Sequence[Turn]) -> str:
    """Return "yes" if every second prompt begins with all of the turn before it, a call, and has the tool's result
    behind it."""
    decode = world.endpoint.chat.tokenizer.decode
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        whole = np.concatenate([first.prompt, first.completion.ids])
        result = decode(second.prompt[len(whole) :])
        called = decode(first.completion.ids, keep_special_tokens=True)
        if not any(begins in called for begins in CALLS):
            return f"no call: {first.completion.text[:80]}"
        if not np.array_equal(second.prompt[: len(whole)], whole):
            return "no: the prompt was written anew"
        if SECRET in decode(whole) or SECRET not in result:
            return f"no result: {result[:80]}"
    rendered_anew = world.endpoint.metrics()["endpoint/tokens_rerendered"]
    return "yes" if turns and rendered_anew > 0 else "no: a new rendering would have been the same tokens"
