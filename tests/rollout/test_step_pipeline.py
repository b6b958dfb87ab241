"""Static steps, launched one ahead, draw the tokens of other steps, whatever happens to the requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError, EngineError
from etude.models import LoraAdapterConfig, Model, adapt
from etude.records import Completion, SamplingParams
from etude.rollout.torch_engine import TorchEngine, TorchEngineConfig
from tests.rollout.engines import engine_of, model_of, prompt_of
from tests.waits import blocked_until

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.05, "temperature": 1.3},
    {"temperature": 0},
    {"repetition_penalty": 1.3},
    {"logit_bias": {5: 2.0, 7: -100.0}},
    {"min_tokens": 6},
    {"top_k": 30, "top_p": 0.9, "temperature": 0.6, "min_p": 0.01},
]
PROMPTS = [prompt_of(length, seed=length) for length in (17, 40, 5, 33, 64)]
SEEDS = 50
SAMPLINGS = [
    SamplingParams(max_tokens=10 + seed % 15, seed=seed * 7919, stop_ids=(3, 11, 19, 23, 42, 77), **KINDS[seed % 10])
    for seed in range(SEEDS)
]


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(layers=3)


def static_engine(model: Model, *, static: bool = True, **config: Any) -> Any:
    return engine_of(model, static_steps=static, deterministic=False, **config)


def play(engine: TorchEngine) -> list[Completion]:
    """Have it continue each prompt ten times, with parameters of all kinds."""
    return engine.generate_all([PROMPTS[seed // 10] for seed in range(SEEDS)], SAMPLINGS)


@pytest.fixture(scope="module")
def expected(model: Model) -> list[Completion]:
    with static_engine(model, static=False, max_num_seqs=16) as engine:
        played = play(engine)
        assert engine.stats().reduce()["engine/static_steps"] == 0
    assert {answer.finish_reason for answer in played} == {"stop", "length"}
    return played


def assert_alike(answers: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Assert that tokens and reasons are equal, and log-probs within the rounding of another order of sums."""
    for answer, other in zip(answers, expected, strict=True):
        assert answer.ids.tolist() == other.ids.tolist()
        assert answer.finish_reason == other.finish_reason
        assert answer.version.tolist() == other.version.tolist()
        np.testing.assert_allclose(answer.logp, other.logp, atol=2e-5)
        assert answer.raw_logp is not None and other.raw_logp is not None
        np.testing.assert_allclose(answer.raw_logp, other.raw_logp, atol=2e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 16},
        pytest.param({"max_num_seqs": 5}, marks=pytest.mark.slow),
        pytest.param({"max_num_seqs": 50}, marks=pytest.mark.slow),
        {"max_num_seqs": 16, "blocks": 40, "block_size": 4},
    ],
    ids=["16 at once", "5 at once", "all at once", "few blocks"],
)
def test_the_tokens_are_those_of_other_steps(config: dict[str, Any], model: Model, expected: list[Completion]) -> None:
    with static_engine(model, **config) as engine:
        assert_alike(play(engine), expected)
        metrics = engine.stats().reduce()
        assert metrics["engine/static_steps"] > 15
        assert metrics["engine/rows_in_vain"] > 0, "a request that ends by a token has one more row"
        assert metrics["engine/host_ms"] > 0
        assert (metrics["engine/preemptions"] > 0) == ("blocks" in config)


def test_rows_that_the_device_cannot_draw_take_other_steps_meanwhile(model: Model) -> None:
    """They report more than a token. Once they have ended, steps are static again."""
    more = [
        SamplingParams(max_tokens=4, seed=1, top_logprobs=2),
        SamplingParams(max_tokens=5, seed=2, alternatives=3),
        SamplingParams(max_tokens=6, seed=3, support=True, top_k=5),
        SamplingParams(max_tokens=7, seed=4, logit_bias=dict.fromkeys(range(9), 1.0)),
        SamplingParams(max_tokens=8, seed=5, stop_ids=tuple(range(200, 209))),
        SamplingParams(max_tokens=20, seed=6),
    ]
    prompts = [prompt_of(9, seed=row) for row in range(len(more))]
    with static_engine(model, static=False) as engine:
        expected = engine.generate_all(prompts, more)
    with static_engine(model) as engine:
        answers = engine.generate_all(prompts, more)
        assert_alike(answers, expected)
        assert engine.stats().reduce()["engine/static_steps"] == 12
    assert answers[0].top_ids is not None and answers[1].alternative_ids is not None
    assert answers[2].support is not None


@contextmanager
def playing(engine: TorchEngine) -> Iterator[Future[list[Completion]]]:
    """Have it play in another thread, while some of its steps have been static and more follow."""
    with ThreadPoolExecutor(1) as threads:
        played = threads.submit(play, engine)
        blocked_until(lambda: engine.stats().reduce()["engine/static_steps"] > 0)
        yield played


def test_a_pause_reads_the_step_under_way_and_requests_go_on_after_it(model: Model, expected: list[Completion]) -> None:
    with static_engine(model, max_num_seqs=50) as engine, playing(engine) as played:
        asyncio.run(engine.pause())
        engine.stats()
        assert not engine._steps.has_unread
        assert engine.stats().reduce()["engine/new_tokens"] == 0
        asyncio.run(engine.resume())
        assert_alike(played.result(30), expected)


def test_an_abort_returns_every_token_that_was_drawn(model: Model, expected: list[Completion]) -> None:
    with static_engine(model, max_num_seqs=50) as engine, playing(engine) as played:
        asyncio.run(engine.abort())
        for answer, other in zip(played.result(30), expected, strict=True):
            length = len(answer.ids)
            assert length >= min(2, len(other.ids))
            assert answer.ids.tolist() == other.ids[:length].tolist()
        assert_alike(play(engine), expected)


def test_a_request_that_leaves_disturbs_no_other(model: Model, expected: list[Completion]) -> None:
    with static_engine(model, max_num_seqs=51) as engine, playing(engine) as played:

        async def leave() -> None:
            stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=400, seed=5))
            async for _ in stream:
                break
            await stream.aclose()

        asyncio.run(leave())
        assert_alike(played.result(30), expected)


def test_weights_that_are_changed_in_place_draw_the_next_tokens(model: Model) -> None:
    """No byte is sent. A step that was launched before counts as the old weights'."""
    saved = [weight.detach().clone() for weight in model.parameters()]

    def change(factor: float) -> None:
        with torch.no_grad():
            for weight, old in zip(model.parameters(), saved, strict=True):
                weight.copy_(old * factor)

    try:
        with static_engine(model, max_num_seqs=50) as engine:
            with playing(engine) as played:
                asyncio.run(engine.pause())
                change(1.03)
                asyncio.run(engine.update_weights((), 1))
                asyncio.run(engine.resume())
                for answer in played.result(30):
                    assert (np.diff(answer.version) >= 0).all()
                assert any(set(answer.version.tolist()) == {0, 1} for answer in played.result())
            after = play(engine)
        with static_engine(model, static=False, max_num_seqs=50) as engine:
            asyncio.run(engine.update_weights((), 1))
            assert_alike(after, play(engine))
    finally:
        change(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True], ids=["added", "merged"])
def test_adapters_draw_the_tokens_of_other_steps_before_and_after_new_ones(merge: bool) -> None:
    model = adapt(model_of(), LoraAdapterConfig(rank=2, alpha=4), seed=0)
    answers: dict[bool, list[Completion]] = {}
    for static in (False, True):
        with static_engine(model, static=static, merge=merge, max_num_seqs=10) as engine:
            answers[static] = []
            for version in (1, 2):
                with torch.no_grad():
                    generator = torch.Generator().manual_seed(version)
                    for weight in model.adapter_weights().values():
                        weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
                weights = list(model.named_weights()) if version == 2 else []
                asyncio.run(engine.update_weights([(name, weight.clone()) for name, weight in weights], version))
                answers[static] += engine.generate_all(PROMPTS, SAMPLINGS[:5])
            assert static == bool(engine.stats().reduce()["engine/static_steps"])
    assert_alike(answers[True], answers[False])


def test_a_step_that_fails_fails_its_requests_and_leaves_nothing_behind(
    model: Model, expected: list[Completion]
) -> None:
    with static_engine(model, max_num_seqs=50) as engine:
        logits, calls = model.logits, count()

        def fail_later(hidden: Tensor) -> Tensor:
            return logits(hidden) * (torch.nan if next(calls) == 4 else 1)

        model.logits = fail_later  # type: ignore[method-assign]
        try:
            with pytest.raises(EngineError, match="not numbers"):
                play(engine)
        finally:
            del model.logits
        assert_alike(play(engine), expected)


@pytest.mark.slow
def test_it_sleeps_and_wakes(model: Model, expected: list[Completion]) -> None:
    with static_engine(model, max_num_seqs=50) as engine:
        play(engine)
        asyncio.run(engine.sleep())
        asyncio.run(engine.wake())
        assert_alike(play(engine), expected)


def test_where_they_are_asked_for_and_cannot_be_they_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gemma3_text model runs transformers' own layers\. Leave"):
        TorchEngine(model_of("gemma3"), None, TorchEngineConfig(static_steps=True, deterministic=False))
    with pytest.raises(ConfigError, match=r"promises\. Set `rollout.deterministic=false`"):
        TorchEngine(model_of(), None, TorchEngineConfig(static_steps=True))
