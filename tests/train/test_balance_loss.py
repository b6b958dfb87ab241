"""The balance loss: its gradient is that of its formula, however a batch is split, and other models are refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm, GptOssTopKRouter

from etude.algorithms import AlgorithmConfig
from etude.batch import Batch
from etude.data.pack import pack_prefix_tree
from etude.errors import BatchError, ConfigError
from etude.models import Model, PackedAttention
from etude.models.balance import PassBalance, Scoring
from etude.train import Learner, PolicyTrainConfig
from tests.families import family_model
from tests.train.tasks import Improve, ready, rollouts

ALGORITHM = AlgorithmConfig()
BALANCED: dict[str, Any] = {"balance": "loss", "balance_rate": 0.5, "router_replay": "r2"}


def exact_policy() -> Model:
    """Return a tiny model in float64, whose norms compute in float64 too."""
    policy = family_model("gpt_oss", torch.float64)
    for part in policy.module.modules():
        if isinstance(part, GptOssRMSNorm):
            part.forward = MethodType(exact_norm, part)  # type: ignore[method-assign]
    return policy


def exact_norm(self: Any, hidden: Tensor) -> Tensor:
    normed: Tensor = self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return normed


def mixture(policy: Model | None = None, precision: str = "fp64", **options: Any) -> Learner:
    config = PolicyTrainConfig(precision=precision, max_grad_norm=None, **{"router_replay": "r2", **options})
    return Learner(policy or exact_policy(), config, steps=10)


def batch_of(learner: Learner) -> Batch:
    """Return a batch with routes, in which one row has nothing to learn."""
    plain = rollouts()
    action = plain.action.clone()
    action[plain.offsets[1] : plain.offsets[2]] = False
    batch = ready(learner, ALGORITHM, plain.replace(action=action))
    return learner.annotate(batch, frozenset({"routes"}))


def updated(learner: Learner, batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return an update's metrics and its gradient, without the loss scale."""
    found = dict[str, Tensor]()

    def keep(gradient: Mapping[str, Tensor], factor: float) -> None:
        found.update((name, factor * x.double()) for name, x in gradient.items())

    learner.watch_gradient(keep)
    return learner.update(batch, Improve(ALGORITHM)).reduce(), found


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest number."""
    return max(float((one[name] - other[name]).abs().max()) for name in one) / max(
        float(x.abs().max()) for x in one.values()
    )


def expected_balance(batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss of the layers, and the gradient of 0.5 times their sum, by autograd."""
    policy = exact_policy()
    found = list[Tensor]()
    for router in policy.module.modules():
        if isinstance(router, GptOssTopKRouter):
            router.register_forward_hook(lambda _module, _inputs, outputs: found.append(outputs[0]))
    pack = pack_prefix_tree(batch)
    policy.hidden(pack.ids, pack.positions, PackedAttention(pack))
    row = torch.repeat_interleave(torch.arange(batch.num_rows), batch.offsets.diff())
    routes = batch.require("routes")[row != 1].view(-1, len(found), 2)
    losses = []
    for layer, scores in enumerate(found):
        probabilities = scores.softmax(-1)[pack.places(batch.offsets)][row != 1]
        shares = routes[:, layer].flatten().bincount(minlength=4).double() / routes[:, layer].numel()
        losses.append(4 * (shares * probabilities.mean(0)).sum())
    total = torch.stack(losses).sum()
    (0.5 * total).backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in policy.trained_weights()
    }
    return float(total.detach()) / len(losses), gradients


def test_the_gradient_is_that_of_the_formula_however_a_batch_is_split() -> None:
    plain = mixture()
    batch = batch_of(plain)
    _, without = updated(plain, batch)
    metrics, found = updated(mixture(**BALANCED), batch)
    loss, expected = expected_balance(batch)
    assert difference(expected, {name: found[name] - without[name] for name in found}) <= 1e-12
    assert metrics["moe/balance_loss"] == pytest.approx(loss, rel=1e-12)
    for checkpointing in ("none", "full"):
        apart = mixture(**BALANCED, max_tokens_per_micro_batch=40, activation_checkpointing=checkpointing)
        metrics, split = updated(apart, batch)
        assert metrics["micro_batches"] >= 3
        assert difference(found, split) <= 1e-12
        assert metrics["moe/balance_loss"] == pytest.approx(loss, rel=1e-12)


def test_fp16_scales_it_as_the_objective() -> None:
    exact, half = mixture(**BALANCED), mixture(family_model("gpt_oss", torch.float16), "fp16", **BALANCED)
    batch = batch_of(exact)
    assert difference(updated(exact, batch)[1], updated(half, batch)[1]) <= 0.02


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_each_function_of_scores_has_its_gradient(scoring: Scoring) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((5, 4), generator=generator, dtype=torch.float64, requires_grad=True)
    shares = torch.tensor([[0.7, 0.1, 0.2, 0.0]], dtype=torch.float64)
    weights = torch.tensor([0.4, 0.0, 0.2, 0.2, 0.2], dtype=torch.float64)
    balance = PassBalance(shares, weights, 3.0, scoring)
    balanced = balance.apply(0, scores)
    assert torch.equal(balanced, scores)
    (found,) = torch.autograd.grad(balanced.sum(), scores)
    numbers = scores.exp() if scoring == "softmax" else scores.sigmoid()
    loss = 4 * (weights @ (numbers / numbers.sum(1, keepdim=True)) * shares).sum()
    (expected,) = torch.autograd.grad(3.0 * loss, scores)
    torch.testing.assert_close(found, 1 + expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(balance.losses[0], loss.detach(), rtol=1e-12, atol=0)


def test_a_balance_that_has_no_loads_or_is_a_bias_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`train.balance=loss` needs the experts .* Set `train.router_replay=r2`"):
        mixture(**BALANCED | {"router_replay": "none"})
    with pytest.raises(ConfigError, match=r"routers without a bias, and this deepseek_v3 model has `.*_bias`"):
        mixture(family_model("deepseek_v3", torch.float64), **BALANCED)
    learner = mixture(**BALANCED)
    with pytest.raises(BatchError, match=r"from the column `routes`, and this batch has none. Compute it with"):
        updated(learner, batch_of(learner).replace(routes=None))
