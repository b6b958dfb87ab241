"""Estimators of one number per rollout, restated rollout by rollout in plain Python, and their refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import mean, stdev

import pytest
import torch

from etude.algorithms.advantages.pass_at_k import pass_at_k, pkpo
from etude.algorithms.advantages.statistics import measure_rewards
from etude.algorithms.base import AlgorithmState
from etude.batch import Batch
from etude.errors import BatchError, ConfigError, MissingColumnError, RewardError
from tests.algorithms.advantages_plain import PlainRollout, close, estimate, irregular_batch, plain_rollouts, to_tokens

SEEDS = range(4)
Formula = Callable[[PlainRollout, list[PlainRollout]], float]


def by_group(batch: Batch, formula: Formula) -> list[float]:
    """Apply a formula to each rollout and its whole group. The formula handles groups without spread."""
    rollouts = plain_rollouts(batch)
    return [formula(p, [q for q in rollouts if q.group == p.group]) for p in rollouts]


def grpo(p: PlainRollout, group: list[PlainRollout]) -> float:
    rewards = [q.total for q in group]
    return p.total if len(group) == 1 else (p.total - mean(rewards)) / (stdev(rewards) + 1e-6)


def rloo(p: PlainRollout, group: list[PlainRollout]) -> float:
    others = [q.total for q in group if q is not p]
    return p.total - (mean(others) if others else 0)


def opo(p: PlainRollout, group: list[PlainRollout]) -> float:
    length = sum(len(q.token_rewards) for q in group)
    return p.total - (sum(len(q.token_rewards) * q.total for q in group) / length if len(group) > 1 else 0)


def centered(p: PlainRollout, group: list[PlainRollout]) -> float:
    return p.total - mean(q.total for q in group)


def baseline_unless_single(p: PlainRollout, group: list[PlainRollout]) -> float:
    return centered(p, group) if len(group) > 1 else p.total


def whiten(values: list[float], over: list[float]) -> list[float]:
    return [(v - mean(over)) / (stdev(over) + 1e-6) for v in values]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "formula"), [("grpo", grpo), ("rloo", rloo), ("opo", opo), ("dr_grpo", centered)])
def test_estimators_within_groups(name: str, formula: Formula, seed: int) -> None:
    batch = irregular_batch(seed)
    close(estimate(name, batch).advantage, to_tokens(batch, by_group(batch, formula)))


@pytest.mark.parametrize("seed", SEEDS)
def test_estimators_over_the_batch(seed: int) -> None:
    batch = irregular_batch(seed)
    totals = [p.total for p in plain_rollouts(batch)]
    close(estimate("batch_mean", batch).advantage, to_tokens(batch, [r - sum(totals) / len(totals) for r in totals]))
    flat = by_group(batch, centered)
    close(estimate("batch_std", batch).advantage, to_tokens(batch, [a / (stdev(flat) + 1e-6) for a in flat]))
    tokens = to_tokens(batch, by_group(batch, baseline_unless_single)).tolist()
    expected = torch.tensor(whiten(tokens, tokens), dtype=torch.float64)
    close(estimate("reinforce++_baseline", batch).advantage, expected)


def test_gpg_gives_the_weight_of_zero_variance_groups_to_the_others() -> None:
    batch = irregular_batch(1, (3, 2, 4))
    reward = torch.where(batch.group == 1, 100.1, batch.require("reward"))
    batch = batch.replace(reward=reward, token_reward=None)
    advantages = [
        a * 9 / 7 / 2.0 for a in (reward - torch.stack([reward[batch.group == g].mean() for g in batch.group]))
    ]
    expected = torch.tensor([float(a) for a in advantages], dtype=torch.float64)
    expected[batch.group == 1] = 0
    lengths = torch.tensor(
        [len(q.turn) for q in plain_rollouts(batch.replace(token_reward=torch.zeros(batch.num_tokens)))]
    )
    close(estimate("gpg", batch, f_norm=2.0).advantage, expected.repeat_interleave(lengths))


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_normalizes_each_part_and_whitens_over_rollouts(seed: int) -> None:
    batch = irregular_batch(seed)
    total = [0.0] * batch.num_rollouts
    for name, weight in (("correct", 1.0), ("format", 0.3)):
        part = batch.require("reward_parts")[:, batch.part_names.index(name)].tolist()
        for u in range(batch.num_rollouts):
            group = [part[o] for o in range(batch.num_rollouts) if batch.group[o] == batch.group[u]]
            alone = len(group) == 1
            total[u] += weight * (part[u] if alone else (part[u] - mean(group)) / (stdev(group) + 1e-6))
    result = estimate("gdpo", batch, weights={"format": 0.3}).advantage
    close(result, to_tokens(batch, whiten(total, total)))


def test_gdpo_refuses_the_weight_of_an_unknown_part() -> None:
    with pytest.raises(ConfigError, match="`speed`; the rewards of this batch have the parts correct, format"):
        estimate("gdpo", irregular_batch(0), weights={"speed": 1.0})


@pytest.mark.parametrize("seed", SEEDS)
def test_remax_and_maxrl(seed: int) -> None:
    batch = irregular_batch(seed)
    greedy = batch.require("greedy_reward").tolist()
    close(
        estimate("remax", batch).advantage,
        to_tokens(batch, [p.total - g for p, g in zip(plain_rollouts(batch), greedy, strict=True)]),
    )
    batch = batch.replace(
        reward=batch.require("reward").abs().round(), token_reward=batch.require("token_reward").abs()
    )

    def maxrl(p: PlainRollout, group: list[PlainRollout]) -> float:
        middle = mean(q.total for q in group)
        return (p.total - middle) / middle if middle else 0.0

    close(estimate("maxrl", batch).advantage, to_tokens(batch, by_group(batch, maxrl)))


def test_maxrl_refuses_a_negative_reward_and_names_the_rollout() -> None:
    batch = irregular_batch(0)
    reward = torch.ones(batch.num_rollouts, dtype=torch.float64)
    reward[3] = -0.5
    with pytest.raises(RewardError, match=f"rollout {int(batch.require('rollout_id')[3])} has -0.5"):
        estimate("maxrl", batch.replace(reward=reward, token_reward=None))
    nothing = estimate("maxrl", batch.replace(reward=0 * reward.abs(), token_reward=None)).advantage
    assert not nothing.any()


def test_pass_at_k_is_the_margin_of_the_best_rollout() -> None:
    reward = torch.tensor([0.5, 2.0, 1.25, 1.0, 1.0, 0.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    assert pass_at_k(reward, group).tolist() == [0, 0.75, 0, 0, 0, 0]


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_pkpo_averages_over_all_sets_of_k(k: int) -> None:
    """Compare with the definition: over all sets of k, the maximum with the rollout less the maximum without it."""
    reward = torch.tensor([0.3, 1.0, 1.0, -2.0, 0.7, 0.3, 5.0, 1.5, 2.0, 2.0, 2.5, 0.1], dtype=torch.float64)
    group = torch.tensor([0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1])
    expected = [0.0] * len(reward)
    for g in (0, 1):
        members = [u for u in range(len(reward)) if group[u] == g]
        sets = list(itertools.combinations(members, k))
        for chosen, u in itertools.product(sets, members):
            if u in chosen:
                best, rest = max(reward[o] for o in chosen), max(reward[o] for o in chosen if o != u)
                expected[u] += float(best - rest) / len(sets)
    close(pkpo(reward, group, k=k), torch.tensor(expected, dtype=torch.float64))


def test_pkpo_of_the_whole_group_is_pass_at_k() -> None:
    reward = torch.tensor([0.3, 1.0, 0.9, -2.0], dtype=torch.float64)
    close(pkpo(reward, torch.zeros(4, dtype=torch.int64), k=4), pass_at_k(reward, torch.zeros(4, dtype=torch.int64)))


@pytest.mark.parametrize("k", [2, 3])
def test_pkpo_is_the_gradient_of_the_expected_best_of_k(k: int) -> None:
    """Enumerate four samples of a softmax over three answers: all 81 outcomes, weighted by their probability."""
    worth = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)
    logits = torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    best = torch.zeros((), dtype=torch.float64)
    for tries in itertools.product(range(3), repeat=k):
        best = best + logp[list(tries)].sum().exp() * worth[list(tries)].max()
    (expected,) = torch.autograd.grad(best, logits, retain_graph=True)
    surrogate = torch.zeros((), dtype=torch.float64)
    for tries in itertools.product(range(3), repeat=4):
        drawn = logp[list(tries)]
        result = pkpo(worth[list(tries)], torch.zeros(4, dtype=torch.int64), k=k)
        surrogate = surrogate + drawn.sum().exp().detach() * (result * drawn).sum()
    close(torch.autograd.grad(surrogate, logits)[0], expected)


def test_pass_at_k_can_be_normalized() -> None:
    batch = irregular_batch(2, (3, 4)).replace(token_reward=None)
    result = estimate("pass_at_k", batch, normalize=True).advantage
    plainly = estimate("pass_at_k", batch).advantage
    std = torch.stack([batch.require("reward")[batch.group == g].std() for g in (0, 1)])[batch.group]
    lengths = torch.diff(torch.searchsorted(batch.action.nonzero()[:, 0], batch.rollout_token_offsets))
    close(result, plainly / (std + 1e-6).repeat_interleave(lengths))


def test_small_groups_are_refused_with_their_numbers() -> None:
    with pytest.raises(BatchError, match="`pass_at_k` compares at least 2 rollouts of a group; group 1 has 1"):
        estimate("pass_at_k", irregular_batch(0))
    with pytest.raises(BatchError, match="`pkpo` compares at least 3 rollouts of a group; group 0 has 2"):
        estimate("pkpo", irregular_batch(0, (2, 4)), k=3)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "batch_mean", "batch_std", "rloo", "opo", "gpg", "maxrl", "pass_at_k", "pkpo"]
)
def test_equal_rewards_give_advantages_of_exactly_zero(name: str) -> None:
    batch = irregular_batch(5, (8,)).replace(reward=torch.full((8,), 100.1, dtype=torch.float64), token_reward=None)
    assert not estimate(name, batch).advantage.any()


def test_rae_averages_the_rewards_of_the_step_in_any_order() -> None:
    batch = irregular_batch(3)
    before = AlgorithmState(kl_value=0.5, role_means={0: 0.25, 7: 3.0})
    result = estimate("rae", batch, before, decay=0.9)
    role, rollouts = batch.require("role").tolist(), plain_rollouts(batch)
    close(
        result.advantage,
        to_tokens(batch, [p.total - (0.25 if r == 0 else 0) for p, r in zip(rollouts, role, strict=True)]),
    )
    assert result.state is not None and result.state.kl_value == 0.5
    after = result.state.role_means
    assert after[7] == 3.0
    for r, start in ((0, 0.25), (1, 0.0)):
        earned = [p.total for p, of in zip(rollouts, role, strict=True) if of == r]
        left = 0.9 ** len(earned)
        assert after[r] == pytest.approx(left * start + (1 - left) * mean(earned), abs=1e-12)
    again = estimate("rae", batch.select(list(reversed(range(batch.num_rollouts)))), before, decay=0.9)
    assert again.state is not None and again.state.role_means == pytest.approx(dict(after), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "column"), [("remax", "greedy_reward"), ("gdpo", "reward_parts"), ("rae", "role"), ("grpo", "reward")]
)
def test_a_missing_column_is_named(name: str, column: str) -> None:
    with pytest.raises(MissingColumnError, match=f"`{column}`"):
        estimate(name, irregular_batch(0).replace(**{column: None}))


def test_metrics_describe_the_groups_and_the_advantages() -> None:
    batch = irregular_batch(0, (2, 1, 3)).replace(
        reward=torch.tensor([1.0, 1.0, 5.0, 0.0, 1.0, 2.0], dtype=torch.float64), token_reward=None
    )
    result = estimate("grpo", batch)
    metrics = result.metrics.reduce()
    rewards = measure_rewards(batch.require("reward"), batch.group).reduce()
    assert rewards["reward_mean"] == pytest.approx(10 / 6)
    assert rewards["zero_variance_share"] == pytest.approx(0.5)
    assert rewards["group_std"] == pytest.approx(0.5)
    for greedy, share in {1.0: 0.5, 0.0: 0.0}.items():
        beside = measure_rewards(batch.require("reward"), batch.group, torch.full((6,), greedy).double()).reduce()
        assert beside["zero_variance_share"] == pytest.approx(share), "the greedy answer counts too"
    assert metrics["advantage_mean"] == pytest.approx(float(result.advantage.mean()))
    assert metrics["advantage_std"] == pytest.approx(float(result.advantage.std()))
    assert (metrics["advantage_min"], metrics["advantage_max"]) == pytest.approx(
        (float(result.advantage.min()), float(result.advantage.max()))
    )
