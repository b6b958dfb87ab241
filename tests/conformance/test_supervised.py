"""Family (c) for the supervised losses: value and gradient of each formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.algorithms import Denominators, Loss, Outputs, Reduction, Unit, View
from etude.algorithms.losses import SUPERVISED
from etude.algorithms.losses.supervised import EchoLoss
from etude.batch import Batch
from tests.batches import random_batch
from tests.conformance.fixtures import irregular_batch
from tests.conformance.restated_losses import finite_differences, reduce_terms
from tests.conformance.test_losses import GRADIENT_TOLERANCE, VALUE_TOLERANCE
from tests.conformance.twin import Array


def random_logp(batch: Batch, seed: int = 9, shape: tuple[int, ...] = ()) -> Tensor:
    """Return random log-probs for every token."""
    draws = np.random.default_rng(seed).gamma(1.5, 0.5, (batch.num_tokens, *shape))
    return -torch.from_numpy(draws)


def check_formula(
    loss: Loss,
    batch: Batch,
    name: str,
    leaf: Tensor,
    where: Tensor,
    formula: Callable[[Array], float],
    **outputs_beside: Any,
) -> None:
    """Check the value of a loss, and its derivative by the entries `where` of an output; by others it must be 0."""
    leaf = leaf.detach().clone().requires_grad_()
    view = View(batch, Outputs(**{name: leaf, **outputs_beside}))
    result = loss(view, Denominators.from_view(view)).loss
    grad = torch.autograd.grad(result, leaf)[0]
    at = leaf.detach()[where].numpy()
    np.testing.assert_allclose(float(result.detach()), formula(at), rtol=VALUE_TOLERANCE, atol=VALUE_TOLERANCE)
    expected = finite_differences(formula, at)
    assert np.abs(expected).max() > 1e-3, "the formula has no gradient here: nothing is compared"
    np.testing.assert_allclose(grad[where].numpy(), expected, rtol=GRADIENT_TOLERANCE, atol=GRADIENT_TOLERANCE)
    grad[where] = 0
    assert bool((grad == 0).all())


def lengths(batch: Batch, unit: Unit = "rollout") -> list[int]:
    return View(batch).units(unit).lengths.tolist()


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean"])
def test_sft(how: Reduction) -> None:
    batch = irregular_batch(3)
    index = View(batch).action_index
    loss = SUPERVISED["sft"](reduction=how)
    check_formula(loss, batch, "logp", random_logp(batch), index, lambda logp: reduce_terms(-logp, lengths(batch), how))


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def pairs() -> tuple[Batch, list[tuple[int, int]]]:
    """Return groups of two, and the rollouts of each as (preferred, other)."""
    batch = random_batch(5, (2, 2, 2, 2), idle=False)
    reward = torch.tensor([1.0, 0.0, 0.2, 0.7, -1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
    return batch.replace(reward=reward), [(0, 1), (3, 2), (4, 5), (7, 6)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo(smoothing: float) -> None:
    batch, preferred = pairs()
    index, ends = View(batch).action_index, np.cumsum(lengths(batch))
    ref = batch.require("ref_logp")[index].numpy()

    def formula(logp: Array) -> float:
        implied_rewards = [(logp - ref)[end - n : end].sum() for end, n in zip(ends, lengths(batch), strict=True)]
        margins = [0.5 * (implied_rewards[good] - implied_rewards[bad]) for good, bad in preferred]
        terms = [
            -(1 - smoothing) * np.log(sigmoid(margin)) - smoothing * np.log(sigmoid(-margin)) for margin in margins
        ]
        return float(np.mean(terms))

    check_formula(
        SUPERVISED["dpo"](beta=0.5, label_smoothing=smoothing), batch, "logp", random_logp(batch), index, formula
    )


def test_reward_model() -> None:
    batch, preferred = pairs()
    score = torch.linspace(-1, 1, 8, dtype=torch.float64).roll(3)

    def formula(s: Array) -> float:
        return float(np.mean([-np.log(sigmoid(s[good] - s[bad])) for good, bad in preferred]))

    check_formula(SUPERVISED["reward_model"](), batch, "score", score, torch.arange(8), formula)


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_value(clip: float | None) -> None:
    batch = irregular_batch(3)
    index = View(batch).action_index
    old, target = batch.require("value")[index].numpy(), batch.require("returns")[index].numpy()

    def formula(value: Array) -> float:
        error = (value - target) ** 2
        if clip is not None:
            error = np.maximum(error, (old + np.clip(value - old, -clip, clip) - target) ** 2)
        return reduce_terms(error / 2, lengths(batch), "token-mean")

    check_formula(SUPERVISED["value"](clip=clip), batch, "value", random_logp(batch), index, formula)


OVER: list[tuple[Reduction, Unit]] = [("token-sum", "rollout"), ("seq-mean-token-mean", "rollout")]
OVER += [("seq-mean-token-mean", "turn"), ("seq-mean-token-sum", "turn")]


def test_value_reductions() -> None:
    """Compare each reduction, over rollouts and over turns."""
    batch = irregular_batch(3)
    index, target = View(batch).action_index, batch.require("returns")[View(batch).action_index].numpy()
    for how, unit in OVER:
        loss, of_units = SUPERVISED["value"](clip=None, reduction=how, unit=unit), lengths(batch, unit)

        def formula(value: Array, how: str = how, of_units: list[int] = of_units) -> float:
            return reduce_terms((value - target) ** 2 / 2, of_units, how)

        check_formula(loss, batch, "value", random_logp(batch), index, formula)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distill_topk(direction: str) -> None:
    """Three tokens are listed, and one bucket has all others, for teacher and student."""
    check_distill_topk(direction, "token-mean", "rollout")


def test_distill_topk_reductions() -> None:
    """Compare each reduction, over rollouts and over turns."""
    for how, unit in OVER:
        check_distill_topk("forward", how, unit)


def check_distill_topk(direction: str, how: Reduction, unit: Unit) -> None:
    batch = irregular_batch(3, (2, 2), longest=6)  # finite differences change four numbers of each token one by one
    index = View(batch).action_index
    teacher = torch.from_numpy(np.random.default_rng(1).normal(size=(batch.num_tokens, 5))).log_softmax(-1)[:, :3]
    student = torch.from_numpy(np.random.default_rng(2).normal(size=(batch.num_tokens, 4))).log_softmax(-1)
    batch = batch.replace(
        teacher_topk_ids=torch.arange(3).repeat(batch.num_tokens, 1),
        teacher_topk_logp=torch.where(batch.action[:, None], teacher, torch.nan),
    )
    teacher_logp = teacher[index].numpy()

    def formula(logp: Array) -> float:
        p, q = np.exp(logp), np.concatenate([np.exp(teacher_logp), 1 - np.exp(teacher_logp).sum(1, keepdims=True)], 1)
        kl = (q * np.log(q / p)).sum(1) if direction == "forward" else (p * np.log(p / q)).sum(1)
        return reduce_terms(kl, lengths(batch, unit), how)

    loss = SUPERVISED["distill_topk"](direction=direction, reduction=how, unit=unit)
    check_formula(loss, batch, "topk_logp", student, index, formula)


def test_without_the_tail_the_truncated_divergence_can_be_negative() -> None:
    """Without a bucket, the divergence over the listed tokens is lower for a student that is surer than the teacher."""
    teacher, student = np.log([0.3, 0.3]), np.log([0.45, 0.45])
    assert (np.exp(teacher) * (teacher - student)).sum() < 0


def test_echo() -> None:
    """Only tool output is trained on."""
    batch = irregular_batch(3)
    observed_tokens = (batch.require("observation") & ~batch.action).nonzero()[:, 0]
    assert 0 < len(observed_tokens) < batch.num_tokens
    check_formula(EchoLoss(), batch, "logp", random_logp(batch), observed_tokens, lambda logp: float(-logp.mean()))
