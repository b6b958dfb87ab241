"""A learner of adapters: an update is what it is for whole weights, and costs memory for adapters alone."""

from __future__ import annotations

import pytest
import torch

from etude.algorithms import AlgorithmConfig
from etude.models import LoraAdapterConfig, Model, adapt
from etude.train import FrozenModel, Learner, TrainConfig
from tests.components import require
from tests.train.tasks import Improve, gradient, model, ready, rollouts, weights


@pytest.fixture(autouse=True)
def _there() -> None:
    require("lora")


def adapted(precision: str = "fp64", family: str = "qwen3") -> Model:
    made = adapt(model(precision, family), LoraAdapterConfig(rank=4), seed=0)
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in made.trained_weights():
            weight.add_(0.05 * torch.randn(weight.shape, generator=chance).to(weight.dtype))
    return made


def learner(precision: str = "fp64", family: str = "qwen3", **options: object) -> Learner:
    given = {"learning_rate": 1e-2, "max_grad_norm": None, **options}
    return Learner(adapted(precision, family), TrainConfig(precision=precision, **given), steps=10)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_however_a_batch_is_cut_the_gradient_is_the_same(family: str) -> None:
    algorithm, found = AlgorithmConfig(), []
    for tokens in (10_000, 40, 1):
        by = learner(family=family, max_tokens_per_micro_batch=tokens)
        by.update(ready(by, algorithm, rollouts()), Improve(algorithm))
        found.append(gradient(by))
    assert found[0].keys() == {name for name, _ in by.model.named_weights() if ".lora_" in name}
    for other in found[1:]:
        for name, wanted in found[0].items():
            torch.testing.assert_close(other[name], wanted, rtol=1e-9, atol=1e-12)


def test_the_model_beneath_is_never_written_to() -> None:
    algorithm, by = AlgorithmConfig(), learner("bf16")
    before = weights(by)
    for _ in range(2):
        by.update(ready(by, algorithm, rollouts()), Improve(algorithm))
    changed = {name for name, weight in by.weights() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_" in name}


def test_a_reference_is_the_model_without_its_adapters_whatever_they_learn() -> None:
    algorithm, by, batch = AlgorithmConfig(), learner(), rollouts()
    reference, alone = FrozenModel(by.model, 60, disable_adapters=True), FrozenModel(model("fp64"), 60)
    for _ in range(2):
        found, wanted = reference.logp(batch), alone.logp(batch)
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
        by.update(ready(by, algorithm, batch), Improve(algorithm))
    assert all(weight.requires_grad for _, weight in by.model.trained_weights()) and len(gradient(by)) == 28


def test_memory_is_two_bytes_a_parameter_and_sixteen_more_for_what_is_trained() -> None:
    by = learner("bf16")
    every, trained = (
        sum(w.numel() for w in of) for of in (by.model.parameters(), dict(by.model.trained_weights()).values())
    )
    held = sum(weight.nbytes for weight in by.model.parameters()) + sum(
        t.nbytes for t in by._backend._optimizer.offloadable_tensors()
    )
    assert held + 4 * trained == 2 * every + 16 * trained, "four of them are the gradient's"
    assert not by.model.take_float32_weights()
