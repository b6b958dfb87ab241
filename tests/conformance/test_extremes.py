"""Extreme inputs: huge log-ratios, equal rewards, groups of one, no actions, and low precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig, AlgorithmState, Denominators, Outputs, View
from etude.batch import COLUMNS, Batch, ColumnKind
from etude.errors import ConfigError, DataError
from tests.conformance.laws import (
    estimate_and_differentiate,
    every_algorithm,
    few_examples,
    fixture,
    gradient,
    model_outputs,
    of_every_algorithm,
)
from tests.sweeps import sweep

ALGORITHMS = every_algorithm()
REFUSE_GROUPS_OF_ONE = ("pass_at_k", "pkpo")
EQUAL_REWARDS_NOT_ZERO = ("remax", "gae", "token_baseline", "distillation", "reinforce++", "rae")
"""Estimators whose advantages of equal rewards are not 0, because their baseline is not that of the whole group."""
STEPWISE = ("step_rewards", "turn_baseline", "turn_baseline_biased", "gigpo", "mt_grpo")


def without_token_rewards(batch: Batch) -> Batch:
    """Return the batch without rewards of single tokens."""
    return batch.replace(token_reward=torch.zeros(batch.num_tokens, dtype=torch.float64))


@of_every_algorithm
@few_examples
@given(seed=st.integers(0, 20), far=st.sampled_from([1e3, -1e3]))
def test_log_ratios_of_a_thousand_give_finite_losses_and_gradients(name: str, seed: int, far: float) -> None:
    algorithm, batch = ALGORITHMS[name], fixture(seed)
    leaves = model_outputs(batch)
    is_even = batch.action & (torch.arange(batch.num_tokens) % 2 == 0)
    leaves["logp"] = torch.where(is_even, batch.require("old_logp") + far, leaves["logp"].detach())
    result = gradient(algorithm, algorithm.estimate(batch, AlgorithmState()), leaves)
    assert torch.isfinite(result.loss)
    assert all(bool(torch.isfinite(g).all()) for g in result.grads.values())


@of_every_algorithm
@few_examples
@given(seed=st.integers(0, 20), far=st.sampled_from([1e3, -1e3]))
def test_sampler_log_probs_off_by_a_thousand_give_finite_losses_and_gradients(name: str, seed: int, far: float) -> None:
    algorithm, batch = ALGORITHMS[name], fixture(seed)
    is_even = torch.arange(batch.num_tokens) % 2 == 0
    columns = ("behavior_logp", "ref_logp", "teacher_logp")
    shifted_columns = {c: torch.where(is_even, batch.require(c) + far, batch.require(c)) for c in columns}
    result = estimate_and_differentiate(algorithm, batch.replace(**shifted_columns))
    assert torch.isfinite(result.loss)
    assert all(bool(torch.isfinite(g).all()) for g in result.grads.values())


@sweep("name", [n for n in ADVANTAGES if n not in EQUAL_REWARDS_NOT_ZERO + STEPWISE])
def test_eight_rewards_of_100_point_1_give_advantages_of_zero(name: str) -> None:
    """In float32 the mean of eight 100.1 is not 100.1. Division by a deviation of 1e-6 would make 0.83 of the error."""
    batch = without_token_rewards(fixture(1, (8,), idle=False))
    batch = batch.replace(
        reward=torch.full((8,), 100.1, dtype=torch.float64),
        reward_parts=torch.full((8, 2), 100.1, dtype=torch.float64),
    )
    advantage = View(AlgorithmConfig(advantage=ADVANTAGES[name]()).estimate(batch, AlgorithmState()).batch).column(
        "advantage"
    )
    assert bool((advantage == 0).all())


@sweep("name", ADVANTAGES)
def test_a_group_of_one_is_defined_or_refused(name: str) -> None:
    batch = without_token_rewards(fixture(2, (1, 1, 1), idle=False))
    algorithm = AlgorithmConfig(advantage=ADVANTAGES[name]())
    if name in REFUSE_GROUPS_OF_ONE:
        with pytest.raises((ConfigError, DataError), match="group"):
            algorithm.estimate(batch, AlgorithmState())
        return
    view = View(algorithm.estimate(batch, AlgorithmState()).batch)
    result = view.column("advantage")
    assert bool(torch.isfinite(result).all())
    reward = view.rollouts.broadcast(batch.require("reward"))
    if name in ("grpo", "rloo", "opo", "token_baseline", "batch_std"):
        expected = {"batch_std": None}.get(name, reward)
        assert expected is None or torch.allclose(result, expected)
    if name in ("dr_grpo", "gpg", "maxrl"):
        assert bool((result == 0).all())


@of_every_algorithm
def test_rollouts_of_one_token_give_finite_losses_and_gradients(name: str) -> None:
    result = estimate_and_differentiate(ALGORITHMS[name], fixture(3, longest=2))
    assert torch.isfinite(result.loss) and all(bool(torch.isfinite(g).all()) for g in result.grads.values())


@of_every_algorithm
def test_a_batch_without_actions_has_no_loss_and_no_gradient(name: str) -> None:
    batch = without_token_rewards(fixture(3))
    idle = batch.replace(action=torch.zeros_like(batch.action), observation=torch.zeros_like(batch.action))
    result = estimate_and_differentiate(ALGORITHMS[name], idle)
    assert float(result.loss) == 0 and all(bool((g == 0).all()) for g in result.grads.values())


def with_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with its float columns of tokens in a narrower type."""
    tokens = {
        name: c.tensor.to(dtype)
        for name, c in batch.columns()
        if COLUMNS.get(name) is ColumnKind.TOKEN and c.tensor.dtype == torch.float64
    }
    return batch.replace(**tokens)


@sweep("dtype", [torch.bfloat16, torch.float16])
@sweep("name", LOSSES)
def test_half_precision_is_widened_before_any_arithmetic(name: str, dtype: torch.dtype) -> None:
    batch = with_dtype(fixture(4), dtype)
    algorithm = AlgorithmConfig(loss=LOSSES[name](), advantage=ADVANTAGES["rloo"]())
    ready = algorithm.estimate(batch, AlgorithmState())
    logp = model_outputs(fixture(4))["logp"].detach().to(dtype)
    half, single = logp.clone().requires_grad_(), logp.float().requires_grad_()
    values = []
    for leaf in (half, single):
        outputs = Outputs(logp=leaf, entropy=leaf)
        value = algorithm.compute_loss(
            ready.batch, outputs, Denominators.from_view(View(ready.batch)), ready.state
        ).loss
        value.backward()
        values.append(value)
    assert values[0].dtype == torch.float32 and torch.equal(values[0], values[1])
    assert half.grad is not None and single.grad is not None
    assert torch.equal(half.grad, single.grad.to(dtype))


@of_every_algorithm
def test_single_precision_agrees_with_double(name: str) -> None:
    batch = fixture(6)
    single = batch.replace(**{
        n: c.tensor.float()
        for n, c in batch.columns()
        if COLUMNS.get(n) is ColumnKind.TOKEN and c.tensor.dtype == torch.float64
    })  # fmt: skip
    algorithm = ALGORITHMS[name]
    leaves = model_outputs(batch)
    double = gradient(algorithm, algorithm.estimate(batch, AlgorithmState()), leaves)
    half = gradient(
        algorithm, algorithm.estimate(single, AlgorithmState()), {k: v.detach().float() for k, v in leaves.items()}
    )
    assert half.loss.dtype == torch.float32
    assert torch.allclose(half.loss.double(), double.loss, rtol=1e-4, atol=1e-5)
    for key, grad in half.grads.items():
        assert torch.allclose(grad.double(), double.grads[key], rtol=1e-3, atol=1e-5)
