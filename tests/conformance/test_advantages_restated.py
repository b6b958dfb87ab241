"""Family (b): estimators compared with their formulas, restated in numpy.

The batches are random and irregular: groups of one and of several, rollouts without tokens and with one, several turns
and rows per rollout, rewards of single tokens (some on a tool's answer), and NaN at entries without a meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from etude.algorithms import AdvantageEstimate, AlgorithmState, View
from etude.algorithms.advantages import ADVANTAGES
from etude.batch import Batch
from etude.errors import BatchError
from tests.conformance import restated_advantages as restated
from tests.conformance import restated_turns
from tests.conformance.fixtures import irregular_batch
from tests.conformance.twin import Array, NumpyRollout, numpy_rollouts

TIGHT = 1e-9
"""The largest allowed difference of a float64 result from its restatement."""
GROUPS = (3, 1, 4, 2, 5)


def make_batch(
    seed: int, *, with_token_rewards: bool = True, groups: Sequence[int] = GROUPS, longest: int = 9
) -> Batch:
    """Return a batch with token rewards, or one without them, in which group 3 has equal rewards."""
    batch = irregular_batch(seed, groups, longest=longest)
    reward = torch.as_tensor(np.random.default_rng(seed).normal(size=batch.num_rollouts))
    if not with_token_rewards:
        reward[batch.group == 3] = 100.1
    actions_so_far = batch.action.long().cumsum(0)
    actions_before_rollout = torch.cat([actions_so_far.new_zeros(1), actions_so_far])[
        batch.rollout_token_offsets[:-1].clamp(max=batch.num_tokens)
    ]
    is_tool_answer = ~batch.action & (
        actions_so_far > actions_before_rollout.repeat_interleave(batch.rollout_token_offsets.diff())
    )  # tokens of a tool's answer, in any row
    amounts = torch.linspace(-1, 2, batch.num_tokens, dtype=torch.float64)  # all different
    token_rewards = torch.where(is_tool_answer, amounts, batch.require("token_reward"))
    return batch.replace(reward=reward, token_reward=token_rewards if with_token_rewards else torch.zeros_like(amounts))


def estimate(name: str, batch: Batch, state: AlgorithmState | None = None, **options: Any) -> AdvantageEstimate:
    return ADVANTAGES[name](**options)(View(batch), state or AlgorithmState())


def assert_equals(result: torch.Tensor, expected: Array) -> None:
    assert len(expected) and np.abs(expected).max() > 1e-3, "the expected values are zero: nothing is compared"
    np.testing.assert_allclose(result.numpy(), expected, rtol=TIGHT, atol=TIGHT)


def check_formula(name: str, formula: Callable[[Sequence[NumpyRollout]], Array], **options: Any) -> None:
    """Compare an estimator with its formula on ten irregular batches. One has rollouts of hundreds of tokens."""
    for seed in range(5):
        for with_token_rewards in (True, False):
            batch = make_batch(
                seed, with_token_rewards=with_token_rewards, longest=200 if seed == 4 and with_token_rewards else 9
            )
            assert_equals(estimate(name, batch, **options).advantage, formula(numpy_rollouts(batch)))


def test_grpo() -> None:
    check_formula("grpo", restated.grpo)


def test_dr_grpo() -> None:
    check_formula("dr_grpo", restated.dr_grpo)


def test_batch_mean() -> None:
    """All groups have the same baseline, also groups of one."""
    check_formula("batch_mean", restated.batch_mean)


def test_batch_std() -> None:
    check_formula("batch_std", restated.batch_std)


def test_rloo() -> None:
    check_formula("rloo", restated.rloo)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp(gamma: float) -> None:
    check_formula("reinforce++", lambda rollouts: restated.reinforce_pp(rollouts, gamma), gamma=gamma)


def test_reinforce_pp_baseline() -> None:
    check_formula("reinforce++_baseline", restated.reinforce_pp_baseline)


def test_remax() -> None:
    check_formula("remax", restated.remax)


def test_opo() -> None:
    check_formula("opo", restated.opo)


@pytest.mark.parametrize("f_norm", [1.0, 0.5])
def test_gpg(f_norm: float) -> None:
    check_formula("gpg", lambda rollouts: restated.gpg(rollouts, f_norm), f_norm=f_norm)


def test_maxrl() -> None:
    for seed in range(5):
        batch = make_batch(seed).replace(token_reward=None)
        reward = (batch.reward.abs() > 0.5).double() if batch.reward is not None else None
        batch = batch.replace(reward=reward)
        assert_equals(estimate("maxrl", batch).advantage, restated.maxrl(numpy_rollouts(batch)))


def test_gdpo() -> None:
    for seed in range(5):
        batch = make_batch(seed)
        result = estimate("gdpo", batch, weights={"correct": 1.0, "format": 0.25})
        assert_equals(result.advantage, restated.gdpo(numpy_rollouts(batch), [1.0, 0.25]))


@pytest.mark.parametrize("groups", [(2, 3, 5), (4,)])
def test_pass_at_k(groups: tuple[int, ...]) -> None:
    for seed in range(5):
        batch = make_batch(seed, groups=groups)
        assert_equals(estimate("pass_at_k", batch).advantage, restated.pass_at_k(numpy_rollouts(batch)))


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pkpo(k: int) -> None:
    for seed in range(5):
        batch = make_batch(seed, groups=(4, 5, 6))
        assert_equals(estimate("pkpo", batch, k=k).advantage, restated.pkpo(numpy_rollouts(batch), k))


@pytest.mark.parametrize("divide", [False, True])
def test_opob(divide: bool) -> None:
    check_formula("opob", lambda rollouts: restated.opob(rollouts, divide=divide), normalize=divide)


def test_token_baseline() -> None:
    check_formula("token_baseline", restated.token_baseline)


def test_token_baseline_refuses_probabilities_of_two_policies() -> None:
    """Σπ² of a distribution is at least π² and at most π² + (1 − π)² for each of its probabilities π.

    Rounding errors of float32 are no reason for a refusal.
    """
    batch = make_batch(0)
    logp, squares = batch.require("old_logp"), batch.require("sum_pi_squared")
    estimate("token_baseline", batch)
    first = int(batch.action.nonzero()[2])
    largest = logp.exp().square() + (1 - logp.exp()).square()
    for impossible in (logp.exp().square() * 0.99, largest * 1.01):
        other = squares.clone()
        other[first] = impossible[first]
        assert re.search(r"no distribution has", refusal(batch.replace(sum_pi_squared=other)))
    almost_one = torch.where(batch.action, -1e-7, torch.nan).float()
    rounded = torch.where(batch.action, 1 - 3e-7, torch.nan).float()
    result = estimate("token_baseline", batch.replace(old_logp=almost_one, sum_pi_squared=rounded)).advantage
    assert bool(torch.isfinite(result).all())


def refusal(batch: Batch) -> str:
    """Return the error with which the token baseline refuses a batch, or an empty string."""
    try:
        estimate("token_baseline", batch)
    except BatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae(gamma: float, lam: float) -> None:
    for seed in range(5):
        batch = make_batch(seed, longest=200 if seed == 4 else 9)
        result = estimate("gae", batch, gamma=gamma, lam=lam, whiten=False)
        advantage, returns = restated.gae(numpy_rollouts(batch), gamma, lam)
        assert_equals(result.advantage, advantage)
        assert result.returns is not None
        assert_equals(result.returns, returns)


def test_gae_whitened() -> None:
    batch = make_batch(0)
    advantage, returns = restated.gae(numpy_rollouts(batch), 1.0, 0.95)
    result = estimate("gae", batch, gamma=1.0, lam=0.95, whiten=True)
    assert_equals(result.advantage, restated.whiten(advantage))
    assert result.returns is not None
    assert_equals(result.returns, returns)


def test_gae_bootstraps_truncated_rollouts() -> None:
    batch = make_batch(0)
    final_value = torch.linspace(-1, 1, batch.num_rollouts, dtype=torch.float64)
    batch = batch.replace(final_value=final_value)
    truncated = batch.require("truncated")
    assert 0 < int(truncated.sum()) < batch.num_rollouts
    result = estimate("gae", batch, gamma=0.9, lam=0.8, bootstrap_truncated=True)
    assert_equals(
        result.advantage,
        restated.gae(numpy_rollouts(batch), 0.9, 0.8, torch.where(truncated, final_value, 0.0).tolist())[0],
    )


def test_distillation() -> None:
    check_formula("distillation", restated.distillation)


def test_rae() -> None:
    batch, before = make_batch(0), {0: 0.7}
    result = estimate("rae", batch, AlgorithmState(role_means=before), decay=0.9)
    advantage, means = restated.rae(numpy_rollouts(batch), before, 0.9)
    assert_equals(result.advantage, advantage)
    assert result.state is not None and {*result.state.role_means} == {0, 1}
    for role, mean in means.items():
        assert abs(result.state.role_means[role] - mean) < TIGHT


# -- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "gamma"), [("to_go", 1.0), ("to_go", 0.8), ("final_to_all", 1.0)])
@pytest.mark.parametrize("baseline", ["none", "group"])
def test_step_rewards(how: str, gamma: float, baseline: str) -> None:
    def formula(rollouts: Sequence[NumpyRollout]) -> Array:
        values = restated_turns.step_rewards(rollouts, how, gamma)
        values = restated_turns.less_baseline(rollouts, values) if baseline == "group" else values
        return restated_turns.to_tokens(rollouts, values)

    check_formula("step_rewards", formula, how=how, gamma=gamma, baseline=baseline)


def test_turn_baseline() -> None:
    check_formula("turn_baseline", restated_turns.turn_baseline)


def test_turn_baseline_biased() -> None:
    check_formula("turn_baseline_biased", restated_turns.turn_baseline_biased)


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_mt_grpo(weight: float) -> None:
    check_formula("mt_grpo", lambda rollouts: restated_turns.mt_grpo(rollouts, weight), turn_weight=weight)


@pytest.mark.parametrize(("weight", "gamma", "divide"), [(1.0, 0.95, False), (0.5, 1.0, True)])
def test_gigpo(weight: float, gamma: float, divide: bool) -> None:
    for seed in range(5):
        batch = make_batch(seed, with_token_rewards=seed % 2 == 0)
        batch = batch.replace(anchor=batch.ids.long() % 2)
        rollouts = numpy_rollouts(batch, anchor=batch.require("anchor"))
        result = estimate("gigpo", batch, step_weight=weight, gamma=gamma, normalize=divide)
        assert_equals(result.advantage, restated_turns.gigpo(rollouts, weight, gamma, divide))
