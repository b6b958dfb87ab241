"""Estimators of single tokens, restated token by token in plain Python, and the tokens that get rewards."""

from __future__ import annotations

import math

import pytest
import torch

from etude.algorithms.advantages.rewards import Rewards
from etude.algorithms.view import View
from etude.errors import RewardError
from tests.algorithms.advantages_plain import PlainRollout, close, estimate, irregular_batch, plain_rollouts

SEEDS = range(4)


def to_go(rewards: list[float], gamma: float) -> list[float]:
    result, behind = [], 0.0
    for r in reversed(rewards):
        behind = r + gamma * behind
        result.append(behind)
    return result[::-1]


def flat(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor([a for one in values for a in one], dtype=torch.float64)


def gae(p: PlainRollout, gamma: float, lam: float, after: float) -> list[float]:
    following = [*p.value[1:], after] if p.value else []
    deltas = [r + gamma * n - v for r, n, v in zip(p.rewards, following, p.value, strict=True)]
    return to_go(deltas, gamma * lam)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bootstrap", [False, True])
def test_gae(seed: int, bootstrap: bool) -> None:
    batch = irregular_batch(seed)
    final, cut = batch.require("final_value").tolist(), batch.require("truncated").tolist()
    after = [f if bootstrap and c else 0.0 for f, c in zip(final, cut, strict=True)]
    expected = flat([gae(p, 0.9, 0.8, a) for p, a in zip(plain_rollouts(batch), after, strict=True)])
    result = estimate("gae", batch, gamma=0.9, lam=0.8, bootstrap_truncated=bootstrap)
    close(result.advantage, expected)
    values = flat([p.value for p in plain_rollouts(batch)])
    assert result.returns is not None
    close(result.returns, expected + values)
    explained_variance = result.metrics.reduce()["explained_variance"]
    assert explained_variance == pytest.approx(float(1 - expected.var() / (expected + values).var()))


def test_gae_whitens_the_advantage_but_not_the_returns() -> None:
    batch = irregular_batch(1)
    raw, white = estimate("gae", batch, lam=0.7), estimate("gae", batch, lam=0.7, whiten=True)
    a = raw.advantage
    close(white.advantage, (a - a.mean()) / (a.std() + 1e-6))
    assert raw.returns is not None and white.returns is not None
    close(white.returns, raw.returns)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp(seed: int, gamma: float) -> None:
    batch = irregular_batch(seed)
    g = flat([to_go(p.rewards, gamma) for p in plain_rollouts(batch)])
    close(estimate("reinforce++", batch, gamma=gamma).advantage, (g - g.mean()) / (g.std() + 1e-6))


@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_token_baseline(seed: int) -> None:
    batch = irregular_batch(seed)
    probability, share = batch.require("old_logp").exp(), batch.require("sum_pi_squared")
    batch = batch.replace(sum_pi_squared=probability**2 + share * (1 - probability) ** 2)
    rollouts = plain_rollouts(batch)
    going = [to_go(p.rewards, 1.0) for p in rollouts]
    weights = []
    for p in rollouts:
        energy = [
            1 - 2 * math.exp(old_logp) + sum_pi_squared
            for old_logp, sum_pi_squared in zip(p.old_logp, p.sum_pi_squared, strict=True)
        ]
        weights.append([sum(energy[: t + 1]) for t in range(len(energy))])
    expected = []
    for u, p in enumerate(rollouts):
        advantages = []
        for t, g in enumerate(going[u]):
            group_with_token = [o for o, q in enumerate(rollouts) if q.group == p.group and len(q.token_rewards) > t]
            total = sum(weights[o][t] for o in group_with_token)
            advantages.append(
                g
                - (
                    sum(going[o][t] * weights[o][t] for o in group_with_token) / total
                    if len(group_with_token) > 1
                    else 0
                )
            )
        expected.append(advantages)
    close(estimate("token_baseline", batch).advantage, flat(expected))


def test_optimal_token_baseline_of_equal_rewards_is_zero_except_in_the_tail() -> None:
    batch = irregular_batch(4, (8,)).replace(reward=torch.full((8,), 100.1, dtype=torch.float64), token_reward=None)
    result, view = estimate("token_baseline", batch).advantage, View(batch)
    second = view.rollouts.lengths.sort().values[-2]
    assert not result[view.rollouts.position < second].any()
    torch.testing.assert_close(result[view.rollouts.position >= second].unique().tolist() or [100.1], [100.1])


@pytest.mark.parametrize("seed", SEEDS)
def test_distillation(seed: int) -> None:
    batch = irregular_batch(seed)
    expected = flat([[q - p for p, q in zip(r.old_logp, r.teacher_logp, strict=True)] for r in plain_rollouts(batch)])
    result = estimate("distillation", batch)
    close(result.advantage, expected)
    assert result.metrics.reduce()["teacher_kl"] == pytest.approx(float(-expected.mean()))
    far = batch.replace(teacher_logp=batch.require("old_logp") - 1e3)
    assert set(estimate("distillation", far).advantage.tolist()) == {-20.0}


def test_distillation_weighs_each_data_source_and_measures_it_as_it_is() -> None:
    batch = irregular_batch(2)
    plain, weighed = (estimate("distillation", batch, weights=weights) for weights in ({}, {"math": 0.25, "code": 1.0}))
    is_math = View(batch).column("source") == batch.source_names.index("math")
    assert 0 < int(is_math.sum()) < len(is_math)
    close(weighed.advantage, torch.where(is_math, 0.25 * plain.advantage, plain.advantage))
    for result in (plain, weighed):
        measured = result.metrics.reduce()
        assert measured["teacher_kl/math"] == pytest.approx(float(-plain.advantage[is_math].mean()))
        assert measured["teacher_kl/code"] == pytest.approx(float(-plain.advantage[~is_math].mean()))
    unnamed = batch.replace(source=torch.zeros_like(batch.require("source")), source_names=("",))
    assert not [name for name in estimate("distillation", unnamed).metrics if "/" in name]


def test_a_reward_on_a_tools_answer_belongs_to_the_action_before_it() -> None:
    batch = irregular_batch(2)
    answers = batch.action.roll(1) & ~batch.action
    answers[batch.rollout_token_offsets[:-1].clamp(max=batch.num_tokens - 1)] = False
    at = int(answers.nonzero()[0])
    reward_on_context = torch.where(batch.action, batch.require("token_reward"), float("nan"))
    reward_on_context[at] = 0.625
    moved = batch.require("token_reward").clone()
    moved[at - 1] += 0.625
    given, expected = (Rewards(View(batch.replace(token_reward=column))) for column in (reward_on_context, moved))
    close(given.per_token(torch.float64), expected.per_token(torch.float64))
    close(given.total, expected.total)


def test_rewards_without_an_action_are_refused_with_the_rollouts_id() -> None:
    batch = irregular_batch(2)
    name = int(batch.require("rollout_id")[0])
    early, broken = batch.require("token_reward").clone(), batch.require("token_reward").clone()
    early[0] = 1.0
    broken[int(batch.action.nonzero()[0])] = float("nan")
    for column in (early, broken):
        with pytest.raises(RewardError, match=f"Rollout {name} has a token reward of"):
            estimate("reinforce++", batch.replace(token_reward=column))


def test_float32_batches_give_float32_and_half_precision_is_widened() -> None:
    batch = irregular_batch(0)
    single = batch.replace(
        **{
            c: batch.require(c).bfloat16()
            for c in ("old_logp", "behavior_logp", "value", "teacher_logp", "token_reward")
        }
    )
    for name in ("gae", "grpo", "reinforce++", "token_baseline", "turn_baseline", "distillation"):
        result = estimate(name, single).advantage
        assert result.dtype == torch.float32 and bool(torch.isfinite(result).all())
