"""Estimators of turns, restated turn by turn in plain Python."""

from __future__ import annotations

from statistics import mean, stdev

import pytest
import torch

from etude.algorithms.view import View
from etude.batch import Batch
from etude.errors import ConfigError
from tests.algorithms.advantages_plain import Plain, awkward, close, estimate, plain

SEEDS = range(5)


def to_go(rewards: list[float], gamma: float = 1.0) -> list[float]:
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def over_tokens(every: list[Plain], values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(
        [a for p, own in zip(every, values, strict=True) for a, turn in zip(own, p.turns(), strict=True) for _ in turn],
        dtype=torch.float64,
    )


def less_others(every: list[Plain], values: list[list[float]]) -> list[list[float]]:
    def at(o: int, k: int) -> float:
        if not values[o]:
            return every[o].total if k == 0 else 0.0
        return values[o][k] if k < len(values[o]) else 0.0

    found = []
    for u, p in enumerate(every):
        others = [o for o, q in enumerate(every) if q.group == p.group and o != u]
        found.append([x - (mean(at(o, k) for o in others) if others else 0.0) for k, x in enumerate(values[u])])
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_turn_baseline(seed: int) -> None:
    batch = awkward(seed)
    every = plain(batch)
    wanted = over_tokens(every, less_others(every, [to_go(p.per_turn()) for p in every]))
    close(estimate("turn_baseline", batch).advantage, wanted)
    close(estimate("step_rewards", batch, baseline="group").advantage, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("baseline", ["none", "group"])
def test_step_rewards(seed: int, baseline: str) -> None:
    batch = awkward(seed)
    every = plain(batch)
    going = [to_go(p.per_turn(), 0.8) for p in every]
    to_all = [[sum(p.paid[t] for t in turn) + p.own for turn in p.turns()] for p in every]
    for values, knobs in ((going, {"gamma": 0.8}), (to_all, {"how": "final_to_all"})):
        wanted = less_others(every, values) if baseline == "group" else values
        close(estimate("step_rewards", batch, baseline=baseline, **knobs).advantage, over_tokens(every, wanted))


def test_a_discount_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="`how=final_to_all` discounts nothing"):
        estimate("step_rewards", awkward(0), how="final_to_all", gamma=0.9)


@pytest.mark.parametrize("seed", SEEDS)
def test_turn_baseline_biased(seed: int) -> None:
    batch = awkward(seed)
    every = plain(batch)
    values = []
    for p in every:
        group = [q.per_turn() for q in every if q.group == p.group]
        values.append(to_go([r - mean(q[k] for q in group if len(q) > k) for k, r in enumerate(p.per_turn())]))
    close(estimate("turn_baseline_biased", batch).advantage, over_tokens(every, values))


def normal(x: float, among: list[float]) -> float:
    return (x - mean(among)) / (stdev(among) + 1e-6) if len(among) > 1 else 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_mt_grpo(seed: int) -> None:
    batch = awkward(seed)
    every = plain(batch)
    paid = [[sum(p.paid[t] for t in turn) for turn in p.turns()] for p in every]
    outcome = [p.own + (own[-1] if own else 0.0) for p, own in zip(every, paid, strict=True)]
    values = []
    for u, p in enumerate(every):
        group = [o for o, q in enumerate(every) if q.group == p.group]
        base = outcome[u] if len(group) == 1 else normal(outcome[u], [outcome[o] for o in group])
        inner = [normal(x, [paid[o][k] for o in group if len(paid[o]) > k + 1]) for k, x in enumerate(paid[u][:-1])]
        values.append([base + 0.5 * x for x in inner] + [base] * bool(paid[u]))
    close(estimate("mt_grpo", batch, turn_weight=0.5).advantage, over_tokens(every, values))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_gigpo(seed: int, normalize: bool) -> None:
    batch = awkward(seed)
    every, states = plain(batch), anchors(batch)
    going = [to_go(p.per_turn(), 0.9) for p in every]

    def against(x: float, among: list[float]) -> float:
        return normal(x, among) if normalize else x - mean(among)

    values = []
    for u, p in enumerate(every):
        group = [o for o, q in enumerate(every) if q.group == p.group]
        base = against(p.total, [every[o].total for o in group]) if len(group) > 1 else p.total
        steps = []
        for k, x in enumerate(going[u]):
            alike = [going[o][j] for o in group for j, s in enumerate(states[o]) if s == states[u][k]]
            steps.append(base + 2.0 * against(x, alike))
        values.append(steps)
    found = estimate("gigpo", batch, gamma=0.9, step_weight=2.0, normalize=normalize)
    close(found.advantage, over_tokens(every, values))


def anchors(batch: Batch) -> list[list[int]]:
    """The anchor at each turn's first action token."""
    found, seen = [], batch.require("anchor")
    for u in range(batch.num_rollouts):
        first, end = batch.rollout_token_offsets[u : u + 2].tolist()
        at = [t for t in range(first, end) if batch.action[t]]
        turns = sorted({int(batch.require("turn")[t]) for t in at})
        found.append([int(seen[next(t for t in at if batch.require("turn")[t] == k)]) for k in turns])
    return found


@pytest.mark.parametrize("name", ["turn_baseline", "turn_baseline_biased", "gigpo"])
def test_turns_alike_in_all_rollouts_teach_exactly_nothing(name: str) -> None:
    batch = awkward(5, (8,))
    turn = torch.where(batch.action, 0, -1).int()
    level = torch.full((8,), 100.1, dtype=torch.float64)
    batch = batch.replace(reward=level, token_reward=torch.zeros(batch.num_tokens), turn=turn)
    assert not estimate(name, batch).advantage.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_turns_are_the_stretches_of_one_number(seed: int) -> None:
    batch = awkward(seed)
    wanted = [len(turn) for p in plain(batch) for turn in p.turns()]
    assert View(batch).turns.lengths.tolist() == wanted
