"""Where answers are not recorded, /v1/completions takes several prompts, and returns the log-probs of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from etude.agents.proxy import EndpointConfig
from etude.models import Model, save
from tests.agents.proxy.world import World, chat_of, serving
from tests.rollout.engines import engine_of, model_of

TEXTS = ["The sky is", "2 + 2 = 4", "ö"]


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(vocabulary=chat_of().tokenizer.vocab_size, context=64)


@pytest.fixture(scope="module")
def world(model: Model) -> Iterator[World]:
    chat = chat_of()
    with (
        engine_of(model, chat.tokenizer) as engine,
        serving(engine, chat, scorer=engine, context=64, config=EndpointConfig(parameters="default")) as world,
    ):
        yield world


@pytest.fixture(scope="module")
def key(world: World) -> str:
    return world.attempt("val").model_key


def sent(world: World, key: str, **fields: Any) -> httpx2.Response:
    """Send a call."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{world.url}/completions", json={"model": "policy", **fields}, headers=headers)


def plain_scores(plain: Any, ids: list[int]) -> torch.Tensor:
    """Return [T - 1, V]: the log-probs of a forward pass of transformers alone."""
    with torch.no_grad():
        logits: torch.Tensor = plain(torch.tensor([ids])).logits[0, :-1]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_log_probs_of_a_prompt_are_those_of_transformers(
    world: World, key: str, model: Model, tmp_path: Path, max_tokens: int
) -> None:
    save(model, tmp_path)
    transformers_model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = chat_of().tokenizer
    ids = [tokenizer.encode(text, add_special_tokens=True).tolist() for text in TEXTS]
    for prompts in (TEXTS, ids):
        fields = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
        response = sent(world, key, prompt=prompts, **fields)
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        for text, prompt, choice in zip(TEXTS, ids, choices, strict=True):
            shown = choice["logprobs"]
            assert len(shown["tokens"]) == len(prompt) + max_tokens and choice["text"].startswith(text)
            assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
            plain = plain_scores(transformers_model, prompt)
            wanted = plain.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            got = shown["token_logprobs"][1 : len(prompt)]
            assert np.allclose(got, wanted.numpy(), rtol=0, atol=1e-5)
            best = [max(tops.values()) for tops in shown["top_logprobs"][1 : len(prompt)]]
            assert np.allclose(best, plain.amax(-1).numpy(), rtol=0, atol=1e-5)
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == sum(map(len, ids)) and usage["completion_tokens"] == 3 * max_tokens


def test_several_prompts_get_the_answers_of_each_alone(world: World, key: str) -> None:
    fields = {"max_tokens": 3, "seed": 5, "n": 2}
    together = sent(world, key, prompt=TEXTS, **fields).json()
    alone = [sent(world, key, prompt=text, **fields).json() for text in TEXTS]
    texts = [choice["text"] for response in alone for choice in response["choices"]]
    assert [choice["text"] for choice in together["choices"]] == texts
    assert together["usage"]["total_tokens"] == sum(response["usage"]["total_tokens"] for response in alone)


def test_a_scored_prompt_is_tokenized_as_if_nothing_had_been_served(world: World, key: str) -> None:
    """A random model answers with odd tokens: a text that goes on from them has other tokens than the text alone."""
    tokenizer = chat_of().tokenizer
    first = sent(world, key, prompt="say", max_tokens=4, seed=1).json()["choices"][0]["text"]
    text = f"say{first} and more"
    scored = sent(world, key, prompt=text, max_tokens=0, echo=True, logprobs=0).json()
    alone = tokenizer.encode(text, add_special_tokens=True)
    assert scored["usage"]["prompt_tokens"] == len(alone)
    assert scored["choices"][0]["logprobs"]["tokens"] == [
        tokenizer.decode([id], keep_special_tokens=True) for id in alone
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": ["a"] * 129}, "at most 128"),
        ({"prompt": ["a", "b"], "stream": True}, "'stream' cannot be true for several prompts"),
        ({"prompt": ["a", ""]}, "is empty"),
        ({"prompt": []}, "'prompt' is empty. Send a string"),
        ({"prompt": [["a", "b"]]}, "must be a string, or a list of token ids"),
        ({"prompt": "a", "max_tokens": 0}, "it is 0. It may be 0 beside 'echo'"),
        ({"prompt": "a", "echo": True, "stream": True}, "'echo' cannot be true in a stream"),
        ({"prompt": [7] * 65, "echo": True, "max_tokens": 0}, "too long"),
    ],
)
def test_other_calls_are_refused(world: World, key: str, fields: dict[str, Any], says: str) -> None:
    response = sent(world, key, **fields)
    assert response.status_code == 400 and says in response.text
