"""The engine computes what the model computes, in every family, however its work is divided, and the same bits each
time."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.models import Model
from etude.records import Completion, SamplingParams
from etude.rollout.torch_engine import TorchEngine
from tests.rollout.engines import assert_follows, engine_of, logp_under, model_of, prompt_of, same
from tests.waits import until

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_gives_the_log_probs_of_every_family(family: str) -> None:
    """Chunked prompts, shared prompts, several blocks, and a window if the family has one."""
    sizes: dict[str, Any] = {"sliding_window": 12} if family in ("mistral", "gemma2", "gemma3") else {}
    model = model_of(family, **sizes)
    prompts = [prompt_of(length, seed=length) for length in (3, 16, 37, 70)]
    prompts += [prompts[3], np.concatenate([prompts[3][:40], prompts[0]])]
    samplings = [SamplingParams(max_tokens=10, temperature=row % 2, seed=row) for row in range(len(prompts))]
    with engine_of(model, max_num_batched_tokens=48, block_size=8) as engine:
        for prompt, sampling, completion in zip(
            prompts, samplings, engine.generate_all(prompts, samplings), strict=True
        ):
            assert len(completion.ids) == 10
            assert_follows(model, prompt, completion, sampling)


def mixed(count: int) -> tuple[list[np.ndarray], list[SamplingParams]]:
    """Return requests of many lengths and kinds; every third shares the beginning of the one before."""
    random = np.random.default_rng(7)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 20, "repetition_penalty": 1.2},
        {"min_p": 0.02, "logit_bias": {5: 1.5}, "min_tokens": 5, "stop_ids": (5,)},
        {"temperature": 1.3, "top_logprobs": 3},
    ]
    prompts: list[np.ndarray] = []
    samplings = []
    for row in range(count):
        prompt = prompt_of(int(random.integers(1, 50)), seed=row)
        if row % 3 == 2:
            prompt = np.concatenate([prompts[-1][: int(random.integers(1, 50))], prompt[:20]])
        prompts.append(prompts[-1] if row % 7 == 6 else prompt)
        samplings.append(SamplingParams(max_tokens=int(random.integers(20, 90)), seed=row, **kinds[row % len(kinds)]))
    return prompts, samplings


async def _arriving(
    engine: TorchEngine, prompts: list[np.ndarray], samplings: list[SamplingParams]
) -> list[Completion]:
    """Send the requests five at a time, each five during the fourth step after the ones before."""
    loop, logits = asyncio.get_running_loop(), engine.model.logits
    tasks: list[asyncio.Task[Completion]] = []
    steps = count(1)

    async def send() -> None:
        now = slice(len(tasks), len(tasks) + 5)
        pairs = zip(prompts[now], samplings[now], strict=True)
        tasks.extend(asyncio.create_task(engine.generate(prompt, sampling)) for prompt, sampling in pairs)
        await asyncio.sleep(0)  # they are queued

    def send_in_step(hidden: Tensor, words: Tensor | None = None) -> Tensor:
        if next(steps) % 4 == 0 and len(tasks) < len(prompts):
            asyncio.run_coroutine_threadsafe(send(), loop).result(20)
        return logits(hidden, words)

    engine.model.logits = send_in_step  # type: ignore[method-assign]
    await send()
    await until(lambda: len(tasks) == len(prompts))
    answers = await asyncio.gather(*tasks)
    engine.model.logits = logits  # type: ignore[method-assign]
    return answers


@pytest.mark.parametrize(
    ("family", "count", "blocks", "preempted"),
    [
        pytest.param("qwen3", 16, 20, 10, id="qwen3"),
        pytest.param("qwen3", 32, 24, 20, id="qwen3, more", marks=pytest.mark.integration),
        pytest.param("gpt2", 32, 24, 20, id="gpt2", marks=pytest.mark.soak),
    ],
)
def test_an_answer_does_not_depend_on_the_other_requests(family: str, count: int, blocks: int, preempted: int) -> None:
    """Mixed arrivals, lengths and parameters, with many preemptions, bit for bit equal to requests one by one."""
    model = model_of(family)
    prompts, samplings = mixed(count)
    with engine_of(model, blocks=blocks, block_size=8, max_num_seqs=16, max_num_batched_tokens=64) as engine:
        together = asyncio.run(_arriving(engine, prompts, samplings))
        happened = engine.stats().reduce()
    assert happened["engine/preemptions"] >= preempted
    assert 0 < happened["engine/cache_hit_rate"] < 1
    with engine_of(model) as engine:
        for prompt, sampling, one in zip(prompts, samplings, together, strict=True):
            alone = engine.generate_all([prompt], [sampling])[0]
            assert same(one, alone) or not engine.exact
            assert_follows(model, prompt, one, sampling)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_long_common_prefixes_are_attended_once_and_change_nothing(family: str) -> None:
    """Groups of several sizes over prompts of several lengths, some the same; bit for bit equal to requests one by
    one."""
    model = model_of(family, **({} if family == "qwen3" else {"sliding_window": 150}))
    base = prompt_of(400)
    prompts = [base[:length] for length in (400, 400, 400, 290, 290, 140, 128, 129)]
    prompts += [np.concatenate([base[:270], prompt_of(30, seed=seed)]) for seed in range(3)] + [prompt_of(300, seed=9)]
    samplings = [SamplingParams(max_tokens=12, seed=row) for row in range(len(prompts))]
    with engine_of(model) as engine:
        together = engine.generate_all(prompts, samplings)
        for prompt, sampling, one in zip(prompts, samplings, together, strict=True):
            assert_follows(model, prompt, one, sampling)
            asyncio.run(engine.update_weights((), 0))
            assert same(one, engine.generate_all([prompt], [sampling])[0]) or not engine.exact


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_prompt_in_chunks_gives_the_bits_of_the_whole_prompt(family: str) -> None:
    """A chunk may end in a sum over few keys, with more rows than the whole prompt has there."""
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "layers": 3, "vocabulary": 50}
    assert_same_in_chunks(model_of(family, **sizes), prompt_of(130, vocabulary=50), chunk=24, block_size=8)


@pytest.mark.slow
@settings(max_examples=24, deadline=None)
@given(data=st.data())
def test_any_chunks_of_any_prompt_give_the_same_bits_at_any_width(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(["llama", "qwen3", "gemma3"]))
    kv_heads = data.draw(st.sampled_from([1, 2, 4]))
    model = model_of(
        family,
        layers=1,
        vocabulary=50,
        hidden=data.draw(st.sampled_from(range(16, 97, 8))),
        heads=kv_heads * data.draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([8, 16, 24, 32])),
    )
    prompt = prompt_of(data.draw(st.integers(2, 300)), vocabulary=50)
    assert_same_in_chunks(
        model, prompt, chunk=data.draw(st.integers(4, 200)), block_size=data.draw(st.sampled_from([8, 16, 24]))
    )


def assert_same_in_chunks(model: Model, prompt: np.ndarray, *, chunk: int, block_size: int) -> None:
    """Assert that an engine that claims exactness gives the same bits whole and in chunks of the prompt."""
    sampling, done = SamplingParams(max_tokens=12, seed=0), []
    for tokens in (2048, chunk):
        with engine_of(model, max_num_batched_tokens=tokens, block_size=block_size) as engine:
            done += engine.generate_all([prompt], [sampling])
    assert same(*done) or not engine.exact


def test_in_bfloat16_the_engine_is_within_rounding_of_the_model() -> None:
    model = model_of().copy(dtype=torch.bfloat16)
    wide = model.copy(dtype=torch.float32)
    prompts = [prompt_of(length, seed=length) for length in (5, 40, 77)]
    with engine_of(model) as engine:
        done = engine.generate_all(prompts, [SamplingParams(max_tokens=12, seed=1)] * 3)
    for prompt, completion in zip(prompts, done, strict=True):
        assert completion.raw_logp is not None
        assert np.abs(completion.raw_logp - logp_under(wide, prompt, completion)).mean() < 0.1
