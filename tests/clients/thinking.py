"""An endpoint for agents that bring long prompts and their own tools. Its model thinks, and calls one of the tools.

The model is a real one in a real engine. Its weights are a table of the tokens that follow each token
(`tests.agents.proxy.tables`). Its template shows it, by a token, what is asked, as that of `suite` does. No template
would give its calls this spacing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from etude.chat import ChatRenderer
from etude.chat.tokenizer import Ids
from etude.images import PromptImages
from etude.records import Completion, SamplingParams
from etude.rollout.request import Delta
from etude.rollout.torch_engine import TorchEngine
from tests.agents.proxy.tables import END, START, Table, model_of_table, tokenizer_of
from tests.agents.proxy.world import World, serving
from tests.chat.made import published
from tests.clients.suite import AGAIN, ANSWER, COUNTS, NUMBER
from tests.rollout.engines import engine_of

ROOT = Path(__file__).parents[2]
CONTEXT = 65536
FORM = "<|form|>"
"""A token in the prompt before the model fills in a form."""
FILLED = '{"colour":  "red"}'
"""A form that the model fills in if a grammar forbids its usual answer."""
OPENS = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking"


@dataclass(frozen=True)
class ToolCall:
    """A call of an agent's tool."""

    name: str
    arguments: Mapping[str, Any]

    def write(self) -> str:
        """Return the call with unusual spacing, without its tags."""
        return f'\n{{ "arguments":{json.dumps(self.arguments, separators=(" ,", ":  "))} ,"name":"{self.name}"}}'

    def write_whole(self) -> str:
        """Return the call with its tags."""
        return f"<tool_call>{self.write()}</tool_call>"


@dataclass(frozen=True)
class Calls:
    """The calls that a model makes."""

    first: ToolCall
    """The call that answers a question."""
    last: ToolCall | None = None
    """The call that ends a task, where an agent wants one instead of text."""
    form: ToolCall | None = None
    """The call by which an agent gets an answer of a form. Without one, a grammar of the endpoint gives the form."""

    def table(self) -> Table:
        """Return a table of a thought and a call, what follows the call's result, numbers without an end, and a
        form."""
        call = self.first.write()
        steps = [START, "<think>", "I ", " look.", "</think>", "\n\n", "<tool_call>", call, "</tool_call>", END]
        last = self.last.write_whole() if self.last else ANSWER
        form: dict[str, float] = {self.form.write_whole(): 1.0} if self.form else {ANSWER: 0.9, FILLED: 0.1}
        follows = {one: {other: 1.0} for one, other in pairwise(steps)}
        ends = {text: {END: 1.0} for text in (last, ANSWER, *form)}
        return follows | ends | {AGAIN: {last: 1.0}, FORM: form, COUNTS: {NUMBER: 1.0}, NUMBER: {NUMBER: 1.0}}

    def template(self) -> str:
        """Return the template of Qwen 3 with the tokens that show what is asked."""
        shown = (
            "{%- set question = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join %}"
            f"{{%- if 'for ever' in question %}}{{{{- '{COUNTS}' }}}}"
            f"{{%- elif messages | selectattr('role', 'equalto', 'tool') | list %}}{{{{- '{AGAIN}' }}}}"
            f"{{%- elif 'colour' in question %}}{{{{- '{FORM}' }}}}"
            f"{{%- elif not tools %}}{{{{- '{AGAIN}' }}}}{{%- endif %}}"
        )
        template = published()["qwen3"]
        assert OPENS in template
        return template.replace(OPENS, OPENS.replace("\n    {%- if", f"\n    {shown}\n    {{%- if"))


LOOK = Calls(ToolCall("look", {"key": "notes"}))
"""The call of the tool that the scripts of clients have."""


@cache
def corpus() -> tuple[str, ...]:
    """Return English text for the tokenizer's pieces, because the prompts of these agents are long."""
    return tuple(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))


@dataclass
class CountedUpstream:
    """An engine, and what it was asked for."""

    engine: TorchEngine
    whole: int = 0
    """The number of answers that were not streamed."""
    streamed: int = 0
    """The number of tokens that were streamed."""

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> Completion:
        """Return the whole answer."""
        self.whole += 1
        return await self.engine.generate(prompt, sampling, images=images)

    async def stream(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Yield the answer as it comes."""
        async with aclosing(self.engine.stream(prompt, sampling, images=images)) as deltas:
            async for delta in deltas:
                self.streamed += len(delta.ids)
                yield delta


@dataclass
class ThinkingWorld:
    """An endpoint, and the engine behind it."""

    world: World
    upstream: CountedUpstream


@contextmanager
def thinking_world(calls: Calls) -> Iterator[ThinkingWorld]:
    """Serve an endpoint whose model makes these calls."""
    with TemporaryDirectory(prefix="etude-clients-") as directory:
        table = calls.table()
        tokenizer = tokenizer_of(table, calls.template(), Path(directory), corpus=corpus(), size=4000)
        model = model_of_table(table, tokenizer, CONTEXT)
        with engine_of(model, tokenizer, kv_gib=0.1, max_num_batched_tokens=4096) as engine:
            upstream = CountedUpstream(engine)
            with serving(upstream, ChatRenderer(tokenizer), context=CONTEXT, holds_grammars=True) as world:
                yield ThinkingWorld(world, upstream)
