"""Estimators of single tokens, restated token by token in plain Python; and where rewards stand."""

from __future__ import annotations

import math

import pytest
import torch

from etude.algorithms.advantages.rewards import Rewards
from etude.algorithms.view import View
from etude.errors import RewardError
from tests.algorithms.advantages_plain import Plain, awkward, close, estimate, plain

SEEDS = range(4)


def to_go(rewards: list[float], gamma: float) -> list[float]:
    found, behind = [], 0.0
    for r in reversed(rewards):
        behind = r + gamma * behind
        found.append(behind)
    return found[::-1]


def flat(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor([a for one in values for a in one], dtype=torch.float64)


def gae(p: Plain, gamma: float, lam: float, after: float) -> list[float]:
    following = [*p.value[1:], after] if p.value else []
    deltas = [r + gamma * n - v for r, n, v in zip(p.rewards, following, p.value, strict=True)]
    return to_go(deltas, gamma * lam)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bootstrap", [False, True])
def test_gae(seed: int, bootstrap: bool) -> None:
    batch = awkward(seed)
    final, cut = batch.require("final_value").tolist(), batch.require("truncated").tolist()
    after = [f if bootstrap and c else 0.0 for f, c in zip(final, cut, strict=True)]
    wanted = flat([gae(p, 0.9, 0.8, a) for p, a in zip(plain(batch), after, strict=True)])
    found = estimate("gae", batch, gamma=0.9, lam=0.8, bootstrap_truncated=bootstrap)
    close(found.advantage, wanted)
    values = flat([p.value for p in plain(batch)])
    assert found.returns is not None
    close(found.returns, wanted + values)
    told = found.metrics.reduce()["explained_variance"]
    assert told == pytest.approx(float(1 - wanted.var() / (wanted + values).var()))


def test_gae_whitens_the_advantage_and_not_the_returns() -> None:
    batch = awkward(1)
    raw, white = estimate("gae", batch, lam=0.7), estimate("gae", batch, lam=0.7, whiten=True)
    a = raw.advantage
    close(white.advantage, (a - a.mean()) / (a.std() + 1e-6))
    assert raw.returns is not None and white.returns is not None
    close(white.returns, raw.returns)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp(seed: int, gamma: float) -> None:
    batch = awkward(seed)
    g = flat([to_go(p.rewards, gamma) for p in plain(batch)])
    close(estimate("reinforce++", batch, gamma=gamma).advantage, (g - g.mean()) / (g.std() + 1e-6))


@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_token_baseline(seed: int) -> None:
    batch = awkward(seed)
    likely, share = batch.require("old_logp").exp(), batch.require("sum_pi_squared")
    batch = batch.replace(sum_pi_squared=likely**2 + share * (1 - likely) ** 2)
    every = plain(batch)
    going = [to_go(p.rewards, 1.0) for p in every]
    weights = []
    for p in every:
        energy = [1 - 2 * math.exp(old) + squares for old, squares in zip(p.old, p.squares, strict=True)]
        weights.append([sum(energy[: t + 1]) for t in range(len(energy))])
    wanted = []
    for u, p in enumerate(every):
        mine = []
        for t, g in enumerate(going[u]):
            there = [o for o, q in enumerate(every) if q.group == p.group and len(q.paid) > t]
            total = sum(weights[o][t] for o in there)
            mine.append(g - (sum(going[o][t] * weights[o][t] for o in there) / total if len(there) > 1 else 0))
        wanted.append(mine)
    close(estimate("token_baseline", batch).advantage, flat(wanted))


def test_optimal_token_baseline_of_equal_rewards_is_zero_but_for_the_tail() -> None:
    batch = awkward(4, (8,)).replace(reward=torch.full((8,), 100.1, dtype=torch.float64), token_reward=None)
    found, view = estimate("token_baseline", batch).advantage, View(batch)
    second = view.rollouts.lengths.sort().values[-2]
    assert not found[view.rollouts.position < second].any()
    torch.testing.assert_close(found[view.rollouts.position >= second].unique().tolist() or [100.1], [100.1])


@pytest.mark.parametrize("seed", SEEDS)
def test_distillation(seed: int) -> None:
    batch = awkward(seed)
    wanted = flat([[q - p for p, q in zip(r.old, r.teacher, strict=True)] for r in plain(batch)])
    found = estimate("distillation", batch)
    close(found.advantage, wanted)
    assert found.metrics.reduce()["teacher_kl"] == pytest.approx(float(-wanted.mean()))
    far = batch.replace(teacher_logp=batch.require("old_logp") - 1e3)
    assert set(estimate("distillation", far).advantage.tolist()) == {-20.0}


def test_a_reward_on_a_tools_answer_is_the_action_befores() -> None:
    batch = awkward(2)
    answers = batch.action.roll(1) & ~batch.action
    answers[batch.rollout_token_offsets[:-1].clamp(max=batch.num_tokens - 1)] = False
    at = int(answers.nonzero()[0])
    told = torch.where(batch.action, batch.require("token_reward"), float("nan"))
    told[at] = 0.625
    moved = batch.require("token_reward").clone()
    moved[at - 1] += 0.625
    here, there = (Rewards(View(batch.replace(token_reward=column))) for column in (told, moved))
    close(here.per_token(torch.float64), there.per_token(torch.float64))
    close(here.total, there.total)


def test_rewards_that_no_action_can_take_are_refused_by_the_rollouts_name() -> None:
    batch = awkward(2)
    name = int(batch.require("rollout_id")[0])
    early, broken = batch.require("token_reward").clone(), batch.require("token_reward").clone()
    early[0] = 1.0
    broken[int(batch.action.nonzero()[0])] = float("nan")
    for told in (early, broken):
        with pytest.raises(RewardError, match=f"Rollout {name} has a token reward of"):
            estimate("reinforce++", batch.replace(token_reward=told))


def test_float32_batches_give_float32_and_half_precision_is_widened() -> None:
    batch = awkward(0)
    single = batch.replace(
        **{
            c: batch.require(c).bfloat16()
            for c in ("old_logp", "behavior_logp", "value", "teacher_logp", "token_reward")
        }
    )
    for name in ("gae", "grpo", "reinforce++", "token_baseline", "turn_baseline", "distillation"):
        found = estimate(name, single).advantage
        assert found.dtype == torch.float32 and bool(torch.isfinite(found).all())
