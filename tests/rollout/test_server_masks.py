"""The llguidance of the servers allows the same tokens as this one, at each place of answers to many schemas."""

from __future__ import annotations

import hashlib
import json
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.chat import ChatRenderer, Tokenizer
from etude.chat.answer_grammar import AnswerForm, CallForm, answer_grammar
from tests.chat.made import byte_level, published, save
from tests.components import require_environment
from tests.served import on

TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": -5, "maximum": 1200}
PARTS: list[dict[str, Any]] = [
    TEXT,
    NUMBER,
    {"type": "number"},
    {"type": "boolean"},
    {"enum": ["red", "blue", None, 3]},
    {"type": "string", "maxLength": 4},
    {"type": "string", "pattern": "^[a-f]{2,3}$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 3},
    {"anyOf": [NUMBER, {"type": "null"}]},
]
WRAPS = [
    lambda part: part,
    lambda part: {"type": "object", "properties": {"a": part, "b": TEXT}, "required": ["a"]},
    lambda part: {"type": "array", "items": part, "maxItems": 2},
    lambda part: {"$defs": {"one": part}, "type": "object", "properties": {"x": {"$ref": "#/$defs/one"}}},
]
"""40 schemas, as products of both lists."""
TOKENS = 40


def grammar_of(chat: ChatRenderer, schema: dict[str, Any], calls: CallForm | None = None) -> str:
    """Return the grammar of an answer, or of calls, as the endpoint writes it."""
    prompt = chat.prompt_ids([{"role": "user", "content": "Go."}])
    return answer_grammar(chat, prompt, None if calls else AnswerForm("json", schema, "response_format"), calls)


def grammars_of(chat: ChatRenderer) -> list[str]:
    """Return the grammars of answers and of calls, as the endpoint writes them."""
    texts = []
    for number, (part, wrap) in enumerate(product(PARTS, WRAPS)):
        schema = wrap(part)
        tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
        calls = CallForm([tool], frozenset({"look"})) if number % 4 == 1 else None
        texts.append(grammar_of(chat, schema, calls))
    return texts


@pytest.mark.integration
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=on(kind)) for kind in ("vllm", "sglang")])
def test_servers_have_the_same_masks_for_many_schemas(kind: str, tmp_path: Path) -> None:
    python = require_environment(kind).python
    template = published()["qwen2_5"]
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(template, ("<|im_end|>",)), template, ("<|im_end|>",)))
    grammars = grammars_of(ChatRenderer(tokenizer))
    draw = np.random.default_rng(0)
    answers: list[list[int]] = []
    wanted: list[list[str]] = []
    for grammar in grammars:
        matcher = tokenizer.grammars.matcher(grammar)
        ids: list[int] = []
        hashes: list[str] = []
        while len(ids) < TOKENS and (not ids or ids[-1] not in tokenizer.eos_ids):
            mask = matcher.mask(tokenizer.vocab_size)
            hashes.append(hashlib.blake2b(mask.tobytes(), digest_size=8).hexdigest())
            ids.append(int(draw.choice(np.flatnonzero(mask))))
            matcher.push(ids[-1])
        answers.append(ids)
        wanted.append(hashes)
    asked = {"tokenizer": tokenizer.to_json(), "size": tokenizer.vocab_size, "end_ids": list(tokenizer.eos_ids)}
    given = json.dumps({**asked, "grammars": grammars, "answers": answers})
    program = Path(__file__).with_name("server_masks.py")
    done = subprocess.run([python, program], input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    different = [grammar for grammar, one, other in zip(grammars, wanted, found, strict=True) if one != other]
    assert len(grammars) == 40 and not different, different[0]
