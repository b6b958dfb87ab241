"""Family (c) for the losses that learn from what is written down: value and slope of each written formula."""

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
from tests.conformance.fixtures import awkward
from tests.conformance.restated_losses import reduced, slope
from tests.conformance.test_losses import SLOPE, VALUE
from tests.conformance.twin import Array


def said(batch: Batch, seed: int = 9, shape: tuple[int, ...] = ()) -> Tensor:
    """Log-probs for every token, below 0."""
    draws = np.random.default_rng(seed).gamma(1.5, 0.5, (batch.num_tokens, *shape))
    return -torch.from_numpy(draws)


def is_formula(
    loss: Loss, batch: Batch, name: str, leaf: Tensor, where: Tensor, formula: Callable[[Array], float], **more: Any
) -> None:
    """The loss has the formula's value and slope in the entries `where` of an output, and no slope in any other."""
    leaf = leaf.detach().clone().requires_grad_()
    view = View(batch, Outputs(**{name: leaf, **more}))
    found = loss(view, Denominators.from_view(view)).loss
    grad = torch.autograd.grad(found, leaf)[0]
    at = leaf.detach()[where].numpy()
    np.testing.assert_allclose(float(found.detach()), formula(at), rtol=VALUE, atol=VALUE)
    wanted = slope(formula, at)
    assert np.abs(wanted).max() > 1e-3, "the formula is flat here: nothing is compared"
    np.testing.assert_allclose(grad[where].numpy(), wanted, rtol=SLOPE, atol=SLOPE)
    grad[where] = 0
    assert bool((grad == 0).all())


def lengths(batch: Batch, unit: Unit = "rollout") -> list[int]:
    return View(batch).units(unit).lengths.tolist()


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean"])
def test_sft(how: Reduction) -> None:
    batch = awkward(3)
    index = View(batch).action_index
    loss = SUPERVISED["sft"](reduction=how)
    is_formula(loss, batch, "logp", said(batch), index, lambda logp: reduced(-logp, lengths(batch), how))


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def pairs() -> tuple[Batch, list[tuple[int, int]]]:
    """Groups of two, and which of each was preferred: (preferred, other)."""
    batch = random_batch(5, (2, 2, 2, 2), idle=False)
    reward = torch.tensor([1.0, 0.0, 0.2, 0.7, -1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
    return batch.replace(reward=reward), [(0, 1), (3, 2), (4, 5), (7, 6)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo(smoothing: float) -> None:
    batch, preferred = pairs()
    index, ends = View(batch).action_index, np.cumsum(lengths(batch))
    ref = batch.require("ref_logp")[index].numpy()

    def formula(logp: Array) -> float:
        gain = [(logp - ref)[end - n : end].sum() for end, n in zip(ends, lengths(batch), strict=True)]
        margins = [0.5 * (gain[good] - gain[bad]) for good, bad in preferred]
        terms = [
            -(1 - smoothing) * np.log(sigmoid(margin)) - smoothing * np.log(sigmoid(-margin)) for margin in margins
        ]
        return float(np.mean(terms))

    is_formula(SUPERVISED["dpo"](beta=0.5, label_smoothing=smoothing), batch, "logp", said(batch), index, formula)


def test_reward_model() -> None:
    batch, preferred = pairs()
    score = torch.linspace(-1, 1, 8, dtype=torch.float64).roll(3)

    def formula(s: Array) -> float:
        return float(np.mean([-np.log(sigmoid(s[good] - s[bad])) for good, bad in preferred]))

    is_formula(SUPERVISED["reward_model"](), batch, "score", score, torch.arange(8), formula)


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_value(clip: float | None) -> None:
    batch = awkward(3)
    index = View(batch).action_index
    old, target = batch.require("value")[index].numpy(), batch.require("returns")[index].numpy()

    def formula(value: Array) -> float:
        error = (value - target) ** 2
        if clip is not None:
            error = np.maximum(error, (old + np.clip(value - old, -clip, clip) - target) ** 2)
        return reduced(error / 2, lengths(batch), "token-mean")

    is_formula(SUPERVISED["value"](clip=clip), batch, "value", said(batch), index, formula)


OVER: list[tuple[Reduction, Unit]] = [("token-sum", "rollout"), ("seq-mean-token-mean", "rollout")]
OVER += [("seq-mean-token-mean", "turn"), ("seq-mean-token-sum", "turn")]


def test_value_reductions() -> None:
    """Each reduction, over rollouts and over turns."""
    batch = awkward(3)
    index, target = View(batch).action_index, batch.require("returns")[View(batch).action_index].numpy()
    for how, unit in OVER:
        loss, of_units = SUPERVISED["value"](clip=None, reduction=how, unit=unit), lengths(batch, unit)

        def formula(value: Array, how: str = how, of_units: list[int] = of_units) -> float:
            return reduced((value - target) ** 2 / 2, of_units, how)

        is_formula(loss, batch, "value", said(batch), index, formula)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_distill_topk(direction: str) -> None:
    """Three listed tokens, and one bucket for all the others on both sides."""
    of_topk(direction, "token-mean", "rollout")


def test_distill_topk_reductions() -> None:
    """Each reduction, over rollouts and over turns."""
    for how, unit in OVER:
        of_topk("forward", how, unit)


def of_topk(direction: str, how: Reduction, unit: Unit) -> None:
    batch = awkward(3, (2, 2), longest=6)  # four numbers a token are moved one by one
    index = View(batch).action_index
    teacher = torch.from_numpy(np.random.default_rng(1).normal(size=(batch.num_tokens, 5))).log_softmax(-1)[:, :3]
    student = torch.from_numpy(np.random.default_rng(2).normal(size=(batch.num_tokens, 4))).log_softmax(-1)
    batch = batch.replace(
        teacher_topk_ids=torch.arange(3).repeat(batch.num_tokens, 1),
        teacher_topk_logp=torch.where(batch.action[:, None], teacher, torch.nan),
    )
    told = teacher[index].numpy()

    def formula(logp: Array) -> float:
        p, q = np.exp(logp), np.concatenate([np.exp(told), 1 - np.exp(told).sum(1, keepdims=True)], 1)
        kl = (q * np.log(q / p)).sum(1) if direction == "forward" else (p * np.log(p / q)).sum(1)
        return reduced(kl, lengths(batch, unit), how)

    loss = SUPERVISED["distill_topk"](direction=direction, reduction=how, unit=unit)
    is_formula(loss, batch, "topk_logp", student, index, formula)


def test_without_the_tail_the_truncated_divergence_can_be_negative() -> None:
    """Why there is a bucket: over the listed tokens alone, a student that is surer than the teacher looks closer."""
    teacher, student = np.log([0.3, 0.3]), np.log([0.45, 0.45])
    assert (np.exp(teacher) * (teacher - student)).sum() < 0


def test_echo() -> None:
    """Tool output is learned from, and nothing else."""
    batch = awkward(3)
    seen = (batch.require("observation") & ~batch.action).nonzero()[:, 0]
    assert 0 < len(seen) < batch.num_tokens
    is_formula(EchoLoss(), batch, "logp", said(batch), seen, lambda logp: float(-logp.mean()))
