"""A learner of adapters: it updates only adapters, and needs optimizer memory only for them."""

from __future__ import annotations

import pytest
import torch

from etude.algorithms import AlgorithmConfig
from etude.models import LoraAdapterConfig, Model, adapt
from etude.train import FrozenModel, Learner, TrainConfig
from tests.components import require
from tests.train.tasks import Improve, gradient, model, ready, rollouts, weights


@pytest.fixture(autouse=True)
def _peft() -> None:
    require("lora")


def adapted(precision: str = "fp64", family: str = "qwen3") -> Model:
    policy = adapt(model(precision, family), LoraAdapterConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in policy.trained_weights():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return policy


def learner(precision: str = "fp64", family: str = "qwen3", **options: object) -> Learner:
    settings = {"learning_rate": 1e-2, "max_grad_norm": None, **options}
    return Learner(adapted(precision, family), TrainConfig(precision=precision, **settings), steps=10)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_the_gradient_does_not_depend_on_micro_batches(family: str) -> None:
    algorithm, gradients = AlgorithmConfig(), []
    for tokens in (10_000, 40, 1):
        trainer = learner(family=family, max_tokens_per_micro_batch=tokens)
        trainer.update(ready(trainer, algorithm, rollouts()), Improve(algorithm))
        gradients.append(gradient(trainer))
    assert gradients[0].keys() == {name for name, _ in trainer.model.named_weights() if ".lora_" in name}
    for other in gradients[1:]:
        for name, expected in gradients[0].items():
            torch.testing.assert_close(other[name], expected, rtol=1e-9, atol=1e-12)


def test_the_base_model_never_changes() -> None:
    algorithm, trainer = AlgorithmConfig(), learner("bf16")
    before = weights(trainer)
    for _ in range(2):
        trainer.update(ready(trainer, algorithm, rollouts()), Improve(algorithm))
    changed = {name for name, weight in trainer.weights() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_" in name}


def test_a_reference_is_the_model_without_its_adapters() -> None:
    algorithm, trainer, batch = AlgorithmConfig(), learner(), rollouts()
    reference, base = FrozenModel(trainer.model, 60, disable_adapters=True), FrozenModel(model("fp64"), 60)
    for _ in range(2):
        logp, expected = reference.logp(batch), base.logp(batch)
        assert torch.equal(logp.nan_to_num(), expected.nan_to_num())
        trainer.update(ready(trainer, algorithm, batch), Improve(algorithm))
    assert all(weight.requires_grad for _, weight in trainer.model.trained_weights()) and len(gradient(trainer)) == 28


def test_memory_is_two_bytes_per_parameter_and_sixteen_more_per_trained_one() -> None:
    trainer = learner("bf16")
    num_all, num_trained = (
        sum(w.numel() for w in weights_of)
        for weights_of in (trainer.model.parameters(), dict(trainer.model.trained_weights()).values())
    )
    num_bytes = sum(weight.nbytes for weight in trainer.model.parameters()) + sum(
        t.nbytes for t in trainer._backend.optimizer.offloadable_tensors()
    )
    assert num_bytes + 4 * num_trained == 2 * num_all + 16 * num_trained, "four of the sixteen bytes are the gradient's"
    assert not trainer.model.take_float32_weights()
