"""Models whose weights are a table: what comes next depends on the last token alone, and is drawn by chance.

They are real models in a real engine, sampled like any other. They call tools in Qwen 3's format without training: a
table has the pieces of such answers, each as a token, with its followers and their probabilities. Some pieces have
unusual spacing, and some are letters that the tokenizer joins. So a new rendering never has the tokens that were
sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken

from etude.chat import ChatRenderer, Tokenizer
from etude.models import Model, create, tiny_config
from etude.records import SamplingParams
from tests.agents.proxy.world import World, serving
from tests.chat.made import byte_level, published, save
from tests.rollout.engines import engine_of

Table = Mapping[str, Mapping[str, float]]
"""The tokens that may follow each token, and their probabilities."""
START, END = "\n", "<|im_end|>"
ENDS = (END, "<|endoftext|>")
CONTEXT = 32768
THOUGHTS: Table = {
    "<think>": {"t": 1},
    "t": {"h": 1},
    "h": {"i": 1},
    "i": {"n": 1},
    "n": {"k": 1},
    "k": {" \n ": 0.5, "</think>": 0.5},
    " \n ": {"</think>": 1},
    "</think>": {"\n\n": 1},
}
"""A thought, letter by letter."""
CALLS: Table = THOUGHTS | {
    START: {"<think>": 0.6, "<tool_call>": 0.3, " Let me look.  ": 0.1},
    "\n\n": {" Let me look.  ": 0.3, "<tool_call>": 0.4, "It is seven. ": 0.3},
    " Let me look.  ": {"<tool_call>": 1},
    "<tool_call>": {'{"name": "look", "arguments": {"key":  "': 0.6, '\n{ "arguments":{"key":"': 0.4},
    '{"name": "look", "arguments": {"key":  "': {"x1": 0.5, "y2": 0.5},
    '\n{ "arguments":{"key":"': {"x1 ": 0.5, "ü2 ": 0.5},
    "x1": {'"}}': 1},
    "y2": {'"} }\n': 0.9, '"]}': 0.1},
    "x1 ": {'"}, "name":"look"}': 1},
    "ü2 ": {'"} , "name":"look"}': 1},
    **{end: {"</tool_call>": 1} for end in ('"}}', '"} }\n', '"]}', '"}, "name":"look"}', '"} , "name":"look"}')},
    "</tool_call>": {END: 0.8, "<tool_call>": 0.2},
    "It is seven. ": {END: 0.8, "🌧": 0.2},
    "🌧": {END: 1},
}
"""Thoughts, text, one call or several, of which some are malformed, and an answer at the end."""
CODE: Table = THOUGHTS | {
    START: {"<think>": 0.6, "Thought: I look.\n": 0.4},
    "\n\n": {"Thought: I look.\n": 1},
    "Thought: I look.\n": {"<code>\n": 1},
    "<code>\n": {'found = look("': 0.7, "final_answer(found)\n": 0.3},
    'found = look("': {"x1": 0.5, "y2": 0.5},
    "x1": {'")\n': 1},
    "y2": {'")\n': 1},
    '")\n': {"print( found )\n": 1},
    "print( found )\n": {"</code>": 1},
    "final_answer(found)\n": {"</code>": 1},
    "</code>": {END: 1},
}
"""Thoughts, and Python code that calls a tool or reports the result."""


def model_of_table(table: Table, tokenizer: Tokenizer, context: int = CONTEXT) -> Model:
    """Build a model whose layers change nothing: each token of the table has its own direction, and the head gives the
    next token's probabilities. After any other token the answer ends."""
    places = {token: place for place, token in enumerate(table, start=1)}
    hidden = 4 * math.ceil((len(places) + 1) / 4)
    sizes: dict[str, Any] = {"layers": 1, "hidden": hidden, "heads": 2, "kv_heads": 1, "head_dim": 2}
    model = create(tiny_config(tokenizer.vocab_size, **sizes, intermediate=4, context=context, tied=False), seed=0)
    weights = dict(model.module.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        embedding.zero_()
        embedding[:, 0] = 1.0
        head.fill_(-30.0)
        head[_id(tokenizer, END), 0] = 0.0
        for token, place in places.items():
            embedding[_id(tokenizer, token)] = 0.0
            embedding[_id(tokenizer, token), place] = 1.0
            for after, share in table[token].items():
                head[_id(tokenizer, after), place] = math.log(share)
        head /= hidden**0.5  # the last norm makes each direction that long
    return model


def _id(tokenizer: Tokenizer, token: str) -> int:
    (id,) = tokenizer.encode(token).tolist()
    return int(id)


def tokenizer_of(table: Table, template: str, directory: Path, **trained: Any) -> Tokenizer:
    """Build a tokenizer that has each token of a table."""
    inner = byte_level(template, ENDS, **trained)
    known = inner.get_vocab()
    inner.add_tokens([AddedToken(piece, normalized=False) for piece in table if piece not in known and piece != START])
    return Tokenizer.load(save(directory, inner, template, ENDS))


@contextmanager
def speaking(table: Table, history: Any = "served", **options: Any) -> Iterator[World]:
    """Serve an endpoint whose model follows a table, with the template of Qwen 3. That template drops earlier thinking,
    trims text and writes calls in another form."""
    with TemporaryDirectory(prefix="etude-table-") as directory:
        tokenizer = tokenizer_of(table, published()["qwen3"], Path(directory))
        with (
            engine_of(model_of_table(table, tokenizer), tokenizer, kv_gib=0.05) as engine,
            serving(
                engine,
                ChatRenderer(tokenizer, history),
                context=CONTEXT,
                train=SamplingParams(max_tokens=80),
                **options,
            ) as world,
        ):
            yield world
