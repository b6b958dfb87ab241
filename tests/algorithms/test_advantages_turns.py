"""Estimators of turns, restated turn by turn in plain Python."""

from __future__ import annotations

from statistics import mean, stdev

import pytest
import torch

from etude.algorithms.view import View
from etude.batch import Batch
from etude.errors import ConfigError
from tests.algorithms.advantages_plain import PlainRollout, close, estimate, irregular_batch, plain_rollouts

SEEDS = range(5)


def reward_to_go(rewards: list[float], gamma: float = 1.0) -> list[float]:
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def to_tokens(rollouts: list[PlainRollout], values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(
        [
            a
            for p, of_turns in zip(rollouts, values, strict=True)
            for a, turn in zip(of_turns, p.turns(), strict=True)
            for _ in turn
        ],
        dtype=torch.float64,
    )


def less_baseline(rollouts: list[PlainRollout], values: list[list[float]]) -> list[list[float]]:
    def at(o: int, k: int) -> float:
        if not values[o]:
            return rollouts[o].total if k == 0 else 0.0
        return values[o][k] if k < len(values[o]) else 0.0

    result = []
    for u, p in enumerate(rollouts):
        others = [o for o, q in enumerate(rollouts) if q.group == p.group and o != u]
        result.append([x - (mean(at(o, k) for o in others) if others else 0.0) for k, x in enumerate(values[u])])
    return result


@pytest.mark.parametrize("seed", SEEDS)
def test_turn_baseline(seed: int) -> None:
    batch = irregular_batch(seed)
    rollouts = plain_rollouts(batch)
    expected = to_tokens(rollouts, less_baseline(rollouts, [reward_to_go(p.per_turn()) for p in rollouts]))
    close(estimate("turn_baseline", batch).advantage, expected)
    close(estimate("step_rewards", batch, baseline="group").advantage, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("baseline", ["none", "group"])
def test_step_rewards(seed: int, baseline: str) -> None:
    batch = irregular_batch(seed)
    rollouts = plain_rollouts(batch)
    going = [reward_to_go(p.per_turn(), 0.8) for p in rollouts]
    to_all = [[sum(p.token_rewards[t] for t in turn) + p.own_reward for turn in p.turns()] for p in rollouts]
    for values, knobs in ((going, {"gamma": 0.8}), (to_all, {"how": "final_to_all"})):
        expected = less_baseline(rollouts, values) if baseline == "group" else values
        close(estimate("step_rewards", batch, baseline=baseline, **knobs).advantage, to_tokens(rollouts, expected))


def test_a_discount_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="`how=final_to_all` discounts nothing"):
        estimate("step_rewards", irregular_batch(0), how="final_to_all", gamma=0.9)


@pytest.mark.parametrize("seed", SEEDS)
def test_turn_baseline_biased(seed: int) -> None:
    batch = irregular_batch(seed)
    rollouts = plain_rollouts(batch)
    values = []
    for p in rollouts:
        group = [q.per_turn() for q in rollouts if q.group == p.group]
        values.append(reward_to_go([r - mean(q[k] for q in group if len(q) > k) for k, r in enumerate(p.per_turn())]))
    close(estimate("turn_baseline_biased", batch).advantage, to_tokens(rollouts, values))


def normalized(x: float, among: list[float]) -> float:
    return (x - mean(among)) / (stdev(among) + 1e-6) if len(among) > 1 else 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_mt_grpo(seed: int) -> None:
    batch = irregular_batch(seed)
    rollouts = plain_rollouts(batch)
    turn_rewards = [[sum(p.token_rewards[t] for t in turn) for turn in p.turns()] for p in rollouts]
    outcome = [
        p.own_reward + (rewards[-1] if rewards else 0.0) for p, rewards in zip(rollouts, turn_rewards, strict=True)
    ]
    values = []
    for u, p in enumerate(rollouts):
        group = [o for o, q in enumerate(rollouts) if q.group == p.group]
        base = outcome[u] if len(group) == 1 else normalized(outcome[u], [outcome[o] for o in group])
        inner = [
            normalized(x, [turn_rewards[o][k] for o in group if len(turn_rewards[o]) > k + 1])
            for k, x in enumerate(turn_rewards[u][:-1])
        ]
        values.append([base + 0.5 * x for x in inner] + [base] * bool(turn_rewards[u]))
    close(estimate("mt_grpo", batch, turn_weight=0.5).advantage, to_tokens(rollouts, values))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_gigpo(seed: int, normalize: bool) -> None:
    batch = irregular_batch(seed)
    rollouts, states = plain_rollouts(batch), anchors(batch)
    going = [reward_to_go(p.per_turn(), 0.9) for p in rollouts]

    def centered(x: float, among: list[float]) -> float:
        return normalized(x, among) if normalize else x - mean(among)

    values = []
    for u, p in enumerate(rollouts):
        group = [o for o, q in enumerate(rollouts) if q.group == p.group]
        base = centered(p.total, [rollouts[o].total for o in group]) if len(group) > 1 else p.total
        steps = []
        for k, x in enumerate(going[u]):
            same_state = [going[o][j] for o in group for j, s in enumerate(states[o]) if s == states[u][k]]
            steps.append(base + 2.0 * centered(x, same_state))
        values.append(steps)
    result = estimate("gigpo", batch, gamma=0.9, step_weight=2.0, normalize=normalize)
    close(result.advantage, to_tokens(rollouts, values))


def anchors(batch: Batch) -> list[list[int]]:
    """Return the anchor at each turn's first action token."""
    anchors_of_rollouts, anchor = [], batch.require("anchor")
    for u in range(batch.num_rollouts):
        first, end = batch.rollout_token_offsets[u : u + 2].tolist()
        at = [t for t in range(first, end) if batch.action[t]]
        turns = sorted({int(batch.require("turn")[t]) for t in at})
        anchors_of_rollouts.append([int(anchor[next(t for t in at if batch.require("turn")[t] == k)]) for k in turns])
    return anchors_of_rollouts


@pytest.mark.parametrize("name", ["turn_baseline", "turn_baseline_biased", "gigpo"])
def test_equal_turns_give_advantages_of_exactly_zero(name: str) -> None:
    batch = irregular_batch(5, (8,))
    turn = torch.where(batch.action, 0, -1).int()
    equal_rewards = torch.full((8,), 100.1, dtype=torch.float64)
    batch = batch.replace(reward=equal_rewards, token_reward=torch.zeros(batch.num_tokens), turn=turn)
    assert not estimate(name, batch).advantage.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_turn_is_a_run_of_tokens_with_one_turn_number(seed: int) -> None:
    batch = irregular_batch(seed)
    expected = [len(turn) for p in plain_rollouts(batch) for turn in p.turns()]
    assert View(batch).turns.lengths.tolist() == expected
