"""The on-policy law: with equal weights the trainer and the embedded engine give the same log-probs."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.algorithms import AlgorithmConfig
from etude.batch import Batch
from etude.chat import Tokenizer
from etude.chat.grammar import HEADER
from etude.data.samples import build_samples
from etude.models import LoraAdapterConfig, Model, adapt, create, tiny_config
from etude.models.tiny import FAMILIES
from etude.recipes.workers.policy_worker import PolicyObjective
from etude.records import Completion, Rollout, SamplingParams, Turn
from etude.rollout import TorchEngine, TorchEngineConfig
from etude.sync import publish_to_engine
from etude.train import Learner, TrainConfig
from etude.train.optim import PRECISIONS
from tests.components import require
from tests.families import family_model
from tests.worlds import make_tokenizer

VOCABULARY, GROUPS, SIZE = 61, 4, 3
OTHERS = tuple(family for family in FAMILIES if family != "qwen3")
TOLERANCE = {"fp32": 2e-5, "bf16": 0.02, "fp64": 1e-6}


@contextmanager
def engine_of(
    model: Model, tokenizer: Tokenizer | None = None, *, merge: bool = False, ahead: bool = False
) -> Iterator[TorchEngine]:
    """Start an engine over a model's own weights. ahead: it launches a step before it reads the one before."""
    config = TorchEngineConfig(
        kv_gib=0.05, max_num_batched_tokens=64, static_steps=ahead or None, deterministic=not ahead
    )
    engine = TorchEngine(model, tokenizer, config, merge=merge)
    try:
        yield engine
    finally:
        engine.close()


def collected(engine: TorchEngine, temperature: float, *others: Mapping[str, Any]) -> tuple[Batch, list[Completion]]:
    """Return groups of answers to prompts of several lengths, as a batch. others: parameters for the answers in
    turn."""
    chance = np.random.default_rng(0)
    prompts = [chance.integers(0, VOCABULARY, 5 + 3 * g, dtype=np.int32) for g in range(GROUPS) for _ in range(SIZE)]
    params = [
        SamplingParams(
            max_tokens=4 + i, temperature=temperature, seed=i, **dict(others[i % len(others)] if others else {})
        )
        for i in range(len(prompts))
    ]
    completions = engine.generate_all(prompts, params)
    rows = [
        sample
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        for sample in build_samples([Turn(prompt, completion, 0)], i)
    ]
    rollouts = [Rollout(i, i // SIZE, i // SIZE, float(i % 2)) for i in range(len(prompts))]
    return Batch.from_records(rows, rollouts), completions


def gap(batch: Batch) -> float:
    """Return the largest difference between the sampler's and the trainer's log-prob of an action token."""
    assert batch.behavior_logp is not None and batch.old_logp is not None
    return float((batch.behavior_logp - batch.old_logp)[batch.action].abs().max())


@pytest.mark.parametrize(
    ("temperature", "family"),
    [
        (1.0, "qwen3"),
        (0.7, "qwen3"),
        *(pytest.param(1.0, family, marks=pytest.mark.slow) for family in OTHERS),
        *(pytest.param(0.7, family, marks=pytest.mark.integration) for family in OTHERS),
    ],
)
def test_trainer_and_sampler_agree(family: str, temperature: float) -> None:
    model = create(tiny_config(VOCABULARY, family=family, layers=2, hidden=32, heads=4, kv_heads=2), seed=1)
    learner = Learner(model, TrainConfig(precision="fp32", max_tokens_per_micro_batch=64), temperature=temperature)
    with engine_of(model) as engine:
        batch, completions = collected(engine, temperature)
    assert gap(learner.annotate(batch, frozenset({"old_logp"}))) < TOLERANCE["fp32"]
    assert all(c.raw_logp is not None and len(c.raw_logp) == len(c.ids) for c in completions)


def test_the_trainer_replays_the_grammar_of_an_answer(tmp_path: Path) -> None:
    size = make_tokenizer(tmp_path)
    model = create(tiny_config(VOCABULARY, layers=2, hidden=32, heads=4, kv_heads=2), seed=1)
    learner = Learner(model, TrainConfig(precision="fp32", max_tokens_per_micro_batch=64), temperature=0.7)
    bound = {"grammar": f"{HEADER}start: /[a-d]{{2,3}}(=[01]{{1,2}})?/", "support": True}
    short = {"grammar": f'{HEADER}start: "ab"', "support": True, "min_tokens": 4}
    with engine_of(model, Tokenizer.load(tmp_path)) as engine:
        batch, completions = collected(engine, 0.7, bound, {**bound, "top_k": 2}, short, {})
    for place, completion in enumerate(completions):
        if place % 4 == 3:
            assert completion.support is None
            continue
        assert completion.support is not None and (completion.support.sizes(VOCABULARY) < size).all()
        if completion.finish_reason == "stop":
            assert re.fullmatch("[a-d]{2,3}(=[01]{1,2})?", completion.text)
    assert [completion.text for completion in completions[2::4]] == ["ab"] * 3, "the end of a grammar ends the answer"
    assert {completion.finish_reason for completion in completions[:2]} == {"length", "stop"}
    assert gap(learner.annotate(batch, frozenset({"old_logp"}))) < TOLERANCE["fp32"]


FILTERS: tuple[Mapping[str, Any], ...] = (
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.3},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05},
    {"logit_bias": {3: -math.inf, 7: -math.inf}},
    {"min_tokens": 3, "stop_ids": (9, 11)},
    {},
)


def test_the_trainer_replays_the_sets_that_the_sampler_drew_from() -> None:
    model = create(tiny_config(VOCABULARY, layers=2, hidden=32, heads=4, kv_heads=2), seed=1)
    learner = Learner(model, TrainConfig(precision="fp32", max_tokens_per_micro_batch=64), temperature=0.7)
    asked = {"support": True, "alternatives": 4}
    with engine_of(model) as engine:
        batch, completions = collected(engine, 0.7, *({**filters, **asked} for filters in FILTERS))
    assert {completion.support is None for completion in completions} == {True, False}
    columns = frozenset({"old_logp", "entropy", "sum_pi_squared", "old_alternative_logp"})
    annotated = learner.annotate(batch, columns)
    assert gap(annotated) < TOLERANCE["fp32"]
    alternatives = batch.require("alternative_logp")[batch.action]
    torch.testing.assert_close(
        annotated.require("old_alternative_logp")[batch.action][:, :-1], alternatives, atol=2e-5, rtol=0
    )
    assert (alternatives == -math.inf).any(), "some sets have fewer than four tokens"
    without = learner.annotate(replace(batch, support=None, support_sets=None), columns)
    assert gap(without) > 0.1, "over the whole vocabulary these tokens are less likely"
    assert annotated.support is not None and without.entropy is not None and annotated.entropy is not None
    bound = batch.action & (annotated.support >= 0)
    assert (annotated.entropy < without.entropy + 1e-6)[bound].all()
    free = batch.action & ~bound
    torch.testing.assert_close(annotated.entropy[free], without.entropy[free])


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "one step ahead"])
@pytest.mark.parametrize("precision", ["bf16", *(pytest.param(p, marks=pytest.mark.slow) for p in ("fp32", "fp64"))])
def test_trainer_and_sampler_agree_after_updates_without_copying_a_byte(precision: str, ahead: bool) -> None:
    config = tiny_config(VOCABULARY, layers=2, hidden=32, heads=4, kv_heads=2)
    model = create(config, seed=1, dtype=PRECISIONS[precision])  # type: ignore[index]
    learner = Learner(model, TrainConfig(precision=precision, learning_rate=1e-2), steps=4)  # type: ignore[arg-type]
    algorithm = AlgorithmConfig()
    with engine_of(model, ahead=ahead) as engine:
        before = None
        for version in range(1, 4):
            batch, _ = collected(engine, 1.0)
            batch = learner.annotate(batch, frozenset({"old_logp"}))
            assert gap(batch) < TOLERANCE[precision]
            assert before is None or not torch.equal(before, model.head_weight)
            before = model.head_weight.detach().clone()
            objective = PolicyObjective(algorithm)
            estimated = algorithm.estimate(batch, objective.state)
            learner.update(estimated.batch, objective)
            metrics = asyncio.run(publish_to_engine(engine, learner.weights(), version)).reduce()
            assert metrics["publish_bytes"] == 0 and engine.version == version
        batch, _ = collected(engine, 1.0)
        assert batch.version is not None and set(batch.version[batch.action].tolist()) == {3}
        assert gap(learner.annotate(batch, frozenset({"old_logp"}))) < TOLERANCE[precision]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "lfm2_moe", "gpt_oss", "deepseek_v3", "gemma4_text"])
def test_trainer_and_sampler_of_layers_of_other_kinds_agree_after_updates(name: str) -> None:
    model = family_model(name, vocab_size=VOCABULARY)
    learner = Learner(model, TrainConfig(precision="fp32", learning_rate=1e-2, max_tokens_per_micro_batch=64), steps=4)
    algorithm = AlgorithmConfig()
    with engine_of(model) as engine:
        for version in range(1, 4):
            batch, _ = collected(engine, 1.0)
            batch = learner.annotate(batch, frozenset({"old_logp"}))
            assert gap(batch) < TOLERANCE["fp32"]
            assert batch.behavior_logp is not None and batch.old_logp is not None
            ratio = (batch.old_logp - batch.behavior_logp)[batch.action].double()
            assert float((ratio.exp() - 1 - ratio).mean()) < 1e-9, "the k3 of trainer and sampler"
            objective = PolicyObjective(algorithm)
            learner.update(algorithm.estimate(batch, objective.state).batch, objective)
            asyncio.run(publish_to_engine(engine, learner.weights(), version))


@pytest.mark.parametrize(
    ("precision", "merge", "family"),
    [
        *((precision, merge, "qwen3") for precision in ("fp32", "bf16") for merge in (False, True)),
        *(pytest.param("fp32", False, family, marks=pytest.mark.slow) for family in OTHERS),
        *(pytest.param("bf16", True, family, marks=pytest.mark.slow) for family in OTHERS),
        *(pytest.param("fp32", True, family, marks=pytest.mark.integration) for family in OTHERS),
        *(pytest.param("bf16", False, family, marks=pytest.mark.integration) for family in OTHERS),
    ],
)
def test_trainer_and_sampler_agree_on_adapters_as_products_and_merged(family: str, merge: bool, precision: str) -> None:
    """An engine that merges rounds W + B A to its precision, and the trainer rounds W x and B A x."""
    require("lora")
    config = tiny_config(VOCABULARY, family=family, layers=2, hidden=32, heads=4, kv_heads=2)
    model = adapt(create(config, seed=1, dtype=PRECISIONS[precision]), LoraAdapterConfig(rank=4), seed=0)  # type: ignore[index]
    with torch.no_grad():
        for name, weight in model.trained_weights():
            if ".lora_B." in name:
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
                weight.copy_(0.02 * noise)
    learner = Learner(model, TrainConfig(precision=precision, max_tokens_per_micro_batch=64))  # type: ignore[arg-type]
    with engine_of(model, merge=merge) as engine:
        batch, _ = collected(engine, 1.0)
    annotated = learner.annotate(batch, frozenset({"old_logp"}))
    assert gap(annotated) < TOLERANCE[precision]
    with torch.no_grad(), model.without_adapters():
        assert gap(learner.annotate(batch, frozenset({"old_logp"}))) > 2 * TOLERANCE["bf16"], "the adapters matter"
