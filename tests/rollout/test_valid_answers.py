"""Answers of a random model to forty schemas are valid by another library's reading of the schemas."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import jsonschema
import pytest

from etude.chat import ChatRenderer, Tokenizer
from etude.models import create, tiny_config
from etude.records import SamplingParams
from tests.chat.made import byte_level, published, save
from tests.rollout.engines import engine_of
from tests.rollout.test_server_masks import PARTS, WRAPS, grammar_of


@pytest.mark.parametrize("draws", [1, pytest.param(25, marks=pytest.mark.soak)])
def test_whole_answers_are_valid_by_their_schemas(draws: int, tmp_path: Path) -> None:
    template = published()["qwen2_5"]
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(template, ("<|im_end|>",)), template, ("<|im_end|>",)))
    chat = ChatRenderer(tokenizer)
    schemas = [wrap(part) for part, wrap in product(PARTS, WRAPS)] * draws
    prompt = chat.prompt_ids([{"role": "user", "content": "Go."}])
    quote = tokenizer.token_to_id('"')
    assert quote is not None
    ends = {quote: 5.0} | dict.fromkeys(tokenizer.eos_ids, 5.0)
    """A random model would go on with a text for long."""
    samplings = [
        SamplingParams(max_tokens=200, grammar=grammar_of(chat, schema), logit_bias=ends, seed=seed)
        for seed, schema in enumerate(schemas)
    ]
    model = create(tiny_config(tokenizer.vocab_size, layers=1, hidden=16, heads=2, kv_heads=1, context=512), seed=0)
    with engine_of(model, tokenizer, kv_gib=0.05, max_num_seqs=64) as engine:
        answers = engine.generate_all([prompt] * len(samplings), samplings)
    whole = [number for number, answer in enumerate(answers) if answer.finish_reason == "stop"]
    for number in whole:
        value = json.loads(answers[number].text)
        jsonschema.validate(value, schemas[number], format_checker=jsonschema.FormatChecker())
    assert len(whole) > 0.9 * len(answers), f"{len(answers) - len(whole)} of {len(answers)} answers were cut"
