"""The awkward inputs that reach a trainer in its second week."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig, AlgorithmState, Denominators, Outputs, View
from etude.batch import COLUMNS, Batch, ColumnKind
from etude.errors import ConfigError, DataError
from tests.conformance.laws import every_algorithm, few, fixture, gradient, of_every_algorithm, said, through
from tests.sweeps import sweep

ALGORITHMS = every_algorithm()
REFUSE_GROUPS_OF_ONE = ("pass_at_k", "pkpo")
LEVEL_IS_NOT_ZERO = ("remax", "gae", "token_baseline", "distillation", "reinforce++", "rae")
"""Estimators for which equal rewards are no reason for A = 0: their baseline is not the group's, or not all of it."""
STEPWISE = ("step_rewards", "turn_baseline", "turn_baseline_biased", "gigpo", "mt_grpo")


def plain(batch: Batch) -> Batch:
    """The batch without rewards for single tokens."""
    return batch.replace(token_reward=torch.zeros(batch.num_tokens, dtype=torch.float64))


@of_every_algorithm
@few
@given(seed=st.integers(0, 20), far=st.sampled_from([1e3, -1e3]))
def test_log_ratios_of_a_thousand_give_finite_losses_and_gradients(name: str, seed: int, far: float) -> None:
    algorithm, batch = ALGORITHMS[name], fixture(seed)
    leaves = said(batch)
    odd = batch.action & (torch.arange(batch.num_tokens) % 2 == 0)
    leaves["logp"] = torch.where(odd, batch.require("old_logp") + far, leaves["logp"].detach())
    found = gradient(algorithm, algorithm.estimate(batch, AlgorithmState()), leaves)
    assert torch.isfinite(found.loss)
    assert all(bool(torch.isfinite(g).all()) for g in found.grads.values())


@of_every_algorithm
@few
@given(seed=st.integers(0, 20), far=st.sampled_from([1e3, -1e3]))
def test_a_sampler_that_was_a_thousand_away_gives_finite_losses_and_gradients(name: str, seed: int, far: float) -> None:
    algorithm, batch = ALGORITHMS[name], fixture(seed)
    odd = torch.arange(batch.num_tokens) % 2 == 0
    columns = ("behavior_logp", "ref_logp", "teacher_logp")
    far_off = {c: torch.where(odd, batch.require(c) + far, batch.require(c)) for c in columns}
    found = through(algorithm, batch.replace(**far_off))
    assert torch.isfinite(found.loss)
    assert all(bool(torch.isfinite(g).all()) for g in found.grads.values())


@sweep("name", [n for n in ADVANTAGES if n not in LEVEL_IS_NOT_ZERO + STEPWISE])
def test_eight_rewards_of_100_point_1_teach_nothing(name: str) -> None:
    """In float32 the mean of eight 100.1 is not 100.1, and a standard deviation of 1e-6 makes 0.83 of it."""
    batch = plain(fixture(1, (8,), idle=False))
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
    batch = plain(fixture(2, (1, 1, 1), idle=False))
    algorithm = AlgorithmConfig(advantage=ADVANTAGES[name]())
    if name in REFUSE_GROUPS_OF_ONE:
        with pytest.raises((ConfigError, DataError), match="group"):
            algorithm.estimate(batch, AlgorithmState())
        return
    view = View(algorithm.estimate(batch, AlgorithmState()).batch)
    found = view.column("advantage")
    assert bool(torch.isfinite(found).all())
    reward = view.rollouts.broadcast(batch.require("reward"))
    if name in ("grpo", "rloo", "opo", "token_baseline", "batch_std"):
        expected = {"batch_std": None}.get(name, reward)
        assert expected is None or torch.allclose(found, expected)
    if name in ("dr_grpo", "gpg", "maxrl"):
        assert bool((found == 0).all())


@of_every_algorithm
def test_rollouts_of_one_token(name: str) -> None:
    found = through(ALGORITHMS[name], fixture(3, longest=2))
    assert torch.isfinite(found.loss) and all(bool(torch.isfinite(g).all()) for g in found.grads.values())


@of_every_algorithm
def test_a_batch_in_which_nobody_acted_teaches_nothing(name: str) -> None:
    batch = plain(fixture(3))
    idle = batch.replace(action=torch.zeros_like(batch.action), observation=torch.zeros_like(batch.action))
    found = through(ALGORITHMS[name], idle)
    assert float(found.loss) == 0 and all(bool((g == 0).all()) for g in found.grads.values())


def halved(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its numbers of tokens rounded to a narrow type, and held in it."""
    tokens = {
        name: c.tensor.to(dtype)
        for name, c in batch.columns()
        if COLUMNS.get(name) is ColumnKind.TOKEN and c.tensor.dtype == torch.float64
    }
    return batch.replace(**tokens)


@sweep("dtype", [torch.bfloat16, torch.float16])
@sweep("name", LOSSES)
def test_half_precision_is_widened_before_any_maths(name: str, dtype: torch.dtype) -> None:
    batch = halved(fixture(4), dtype)
    algorithm = AlgorithmConfig(loss=LOSSES[name](), advantage=ADVANTAGES["rloo"]())
    ready = algorithm.estimate(batch, AlgorithmState())
    logp = said(fixture(4))["logp"].detach().to(dtype)
    narrow, wide = logp.clone().requires_grad_(), logp.float().requires_grad_()
    values = []
    for leaf in (narrow, wide):
        outputs = Outputs(logp=leaf, entropy=leaf)
        value = algorithm.compute_loss(
            ready.batch, outputs, Denominators.from_view(View(ready.batch)), ready.state
        ).loss
        value.backward()
        values.append(value)
    assert values[0].dtype == torch.float32 and torch.equal(values[0], values[1])
    assert narrow.grad is not None and wide.grad is not None
    assert torch.equal(narrow.grad, wide.grad.to(dtype))


@of_every_algorithm
def test_single_precision_agrees_with_double(name: str) -> None:
    batch = fixture(6)
    single = batch.replace(**{
        n: c.tensor.float()
        for n, c in batch.columns()
        if COLUMNS.get(n) is ColumnKind.TOKEN and c.tensor.dtype == torch.float64
    })  # fmt: skip
    algorithm = ALGORITHMS[name]
    leaves = said(batch)
    double = gradient(algorithm, algorithm.estimate(batch, AlgorithmState()), leaves)
    narrow = gradient(
        algorithm, algorithm.estimate(single, AlgorithmState()), {k: v.detach().float() for k, v in leaves.items()}
    )
    assert narrow.loss.dtype == torch.float32
    assert torch.allclose(narrow.loss.double(), double.loss, rtol=1e-4, atol=1e-5)
    for key, grad in narrow.grads.items():
        assert torch.allclose(grad.double(), double.grads[key], rtol=1e-3, atol=1e-5)
