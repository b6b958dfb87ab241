"""Sampling from a model with adapters: by their products, or by a copy of the weights into which they are merged."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest
import torch

from etude.models import EngineModel, LoraAdapterConfig, Model, adapt
from etude.models import engine_model as resident_module
from etude.observe import configure_logging
from etude.records import Completion, SamplingParams
from tests.components import require
from tests.models.test_prepack import has_bf16
from tests.rollout.engines import assert_follows, engine_of, model_of, prompt_of, same

HOW = pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])


@pytest.fixture(autouse=True)
def _there() -> None:
    require("lora")


def adapted_of(family: str = "qwen3", dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """Return a model whose adapters matter as much as its weights."""
    model = model_of(family) if dtype == torch.float32 else model_of(family).copy(dtype=dtype)
    model = adapt(model, LoraAdapterConfig(**{"rank": 4, **options}), seed=0)
    move(model)
    return model


def move(model: Model, seed: int = 0) -> None:
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in model.trained_weights():
            weight.add_(torch.randn(weight.shape, generator=chance).to(weight.dtype), alpha=0.05)


def generate(engine: Any, lengths: tuple[int, ...] = (5, 40, 17), **sampling: Any) -> list[Completion]:
    params = [SamplingParams(max_tokens=9, seed=i, **sampling) for i in range(len(lengths))]
    completions: list[Completion] = engine.generate_all([prompt_of(n, seed=n) for n in lengths], params)
    return completions


@HOW
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_answers_are_those_of_the_adapted_model(family: str, merge: bool) -> None:
    model, sampling = adapted_of(family), SamplingParams(max_tokens=9, temperature=0)
    with engine_of(model, merge=merge) as engine:
        for length in (5, 40):
            prompt = prompt_of(length)
            (completion,) = engine.generate_all([prompt], [sampling])
            assert_follows(model, prompt, completion, sampling)


@HOW
@pytest.mark.parametrize("rank", [1, 3, 8, 16])
def test_an_answer_does_not_depend_on_its_batch(rank: int, merge: bool) -> None:
    with engine_of(adapted_of(rank=rank), merge=merge) as engine:
        together = generate(engine, tuple(range(3, 40, 2)))
        for length in (3, 17, 39):
            index = (length - 3) // 2
            params = SamplingParams(max_tokens=9, seed=index)
            (alone,) = engine.generate_all([prompt_of(length, seed=length)], [params])
            assert same(alone, together[index]) or not engine.exact


@HOW
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_follows_new_weights(dtype: torch.dtype, merge: bool) -> None:
    model = adapted_of(dtype=dtype)
    with engine_of(model, merge=merge) as engine:
        before = generate(engine)
        move(model, seed=1)
        asyncio.run(engine.update_weights((), 1))
        after = generate(engine)
        with engine_of(model, merge=merge) as fresh:
            assert all(same(a, b) for a, b in zip(after, generate(fresh), strict=True))
        assert not any(same(a, b) for a, b in zip(after, before, strict=True))
        assert engine.version == 1


@HOW
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_follows_received_weights_frozen_ones_too(dtype: torch.dtype, merge: bool) -> None:
    model, other = adapted_of(dtype=dtype), adapted_of(dtype=dtype)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)).to(dtype), alpha=0.02)
    with engine_of(model, merge=merge) as engine, engine_of(other, merge=merge) as wanted:
        asyncio.run(engine.update_weights([(name, weight.detach()) for name, weight in other.named_weights()], 1))
        assert all(same(a, b) for a, b in zip(generate(engine), generate(wanted), strict=True))


def test_merging_is_measured_and_its_memory_is_freed_in_sleep() -> None:
    model = adapted_of(targets=("q_proj", "down_proj"))
    weights = dict(model.named_weights())
    size = sum(w.nbytes for n, w in weights.items() if n.endswith(("q_proj.weight", "down_proj.weight")))
    with engine_of(model, merge=True) as engine:
        metrics, before = engine.stats().reduce(), generate(engine)
        assert metrics["engine/merged_bytes"] == size and metrics["engine/merge_seconds"] > 0
        asyncio.run(engine.sleep())
        assert engine._resident.model is model
        move(model, seed=1)
        asyncio.run(engine.update_weights((), 1))
        assert engine.stats().reduce()["engine/merged_bytes"] == 0, "one that sleeps has nothing to merge"
        asyncio.run(engine.wake())
        after = generate(engine)
        assert engine.stats().reduce()["engine/merged_bytes"] == size
        with engine_of(model, merge=True) as fresh:
            assert all(same(a, b) for a, b in zip(after, generate(fresh), strict=True))
        assert not same(before[0], after[0])
    with engine_of(model) as engine:
        assert "engine/merged_bytes" not in engine.stats().reduce()


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_weights_without_adapters_are_shared(family: str) -> None:
    model = adapted_of(family, targets=("q_proj" if family == "qwen3" else "c_attn",))
    held = dict(EngineModel(model, merge=True, prepack=False).model.named_weights())
    theirs = dict(model.named_weights())
    shared = {name for name, weight in held.items() if weight.data_ptr() == theirs[name].data_ptr()}
    assert {name for name, weight in held.items() if weight.ndim == 1 and "c_" not in name} <= shared
    assert any("embed" in name or "wte" in name for name in shared)
    before = {name: weight.clone() for name, weight in theirs.items()}
    move(model)
    EngineModel(model, merge=True, prepack=False).refresh()
    assert all(torch.equal(before[name], weight) for name, weight in theirs.items() if ".lora_" not in name)


@has_bf16
@HOW
def test_unchanged_weights_are_packed_once(merge: bool) -> None:
    model = adapted_of(dtype=torch.bfloat16, targets=("q_proj", "down_proj"))
    with engine_of(model, merge=merge) as engine:
        layout = engine._resident._prepacked
        assert layout is not None
        before = dict(layout._packed)
        asyncio.run(engine.update_weights((), 1))
        unchanged = sum(layout._packed[place] is laid for place, laid in before.items())
        assert unchanged == len(before) - (2 * 2 if merge else 0), "merged: qkv and down, in two layers"


def test_without_memory_for_merging_the_adapters_products_are_added(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> NoReturn:
        raise RuntimeError("could not allocate memory")

    configure_logging("info")
    model = adapted_of()
    monkeypatch.setattr(resident_module, "_copy_without_adapters", full)
    with engine_of(model, merge=True) as engine, engine_of(model) as plain:
        assert "not merged for the engine, which costs speed: could not allocate memory" in capsys.readouterr().err
        assert all(same(a, b) for a, b in zip(generate(engine), generate(plain), strict=True))
