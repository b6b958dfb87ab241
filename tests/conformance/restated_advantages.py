"""The advantage estimators restated in numpy from their papers, one rollout and one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from tests.conformance.twin import Array, NumpyRollout, by_group, flat, to_tokens

EPSILON = 1e-6


def all_equal(r: Array) -> bool:
    """Return True if all rewards of a group of two or more are equal. Then all advantages are 0."""
    return len(r) > 1 and bool((r == r[0]).all())


def grpo_of(rollouts: Sequence[NumpyRollout], values: Sequence[float]) -> list[float]:
    """Return (x − mean) / (std + ε) within the group of each rollout, or x in a group of one."""
    result = list(values)
    for g in {t.group for t in rollouts}:
        members = [u for u, t in enumerate(rollouts) if t.group == g]
        r = np.array([values[u] for u in members])
        if len(r) > 1:
            r = 0 * r if all_equal(r) else (r - r.mean()) / (r.std(ddof=1) + EPSILON)
        for u, value in zip(members, r, strict=True):
            result[u] = float(value)
    return result


def grpo(rollouts: Sequence[NumpyRollout]) -> Array:
    return to_tokens(grpo_of(rollouts, [t.total for t in rollouts]), rollouts)


def centered(r: Array) -> Array:
    """Return R − mean of the group."""
    return 0 * r if all_equal(r) else r - r.mean()


def dr_grpo(rollouts: Sequence[NumpyRollout]) -> Array:
    return to_tokens(by_group(rollouts, centered), rollouts)


def batch_mean(rollouts: Sequence[NumpyRollout]) -> Array:
    r = np.array([t.total for t in rollouts])
    return to_tokens(list(0 * r if all_equal(r) else r - r.mean()), rollouts)


def batch_std(rollouts: Sequence[NumpyRollout]) -> Array:
    centered_rewards = np.array(by_group(rollouts, centered))
    return to_tokens(list(centered_rewards / (centered_rewards.std(ddof=1) + EPSILON)), rollouts)


def rloo(rollouts: Sequence[NumpyRollout]) -> Array:
    def of_group(r: Array) -> Array:
        if len(r) == 1:
            return r
        others = np.array([np.delete(r, i).mean() for i in range(len(r))])
        return 0 * r if all_equal(r) else r - others

    return to_tokens(by_group(rollouts, of_group), rollouts)


def whiten(values: Array) -> Array:
    """Scale all numbers to mean 0 and unbiased variance 1."""
    result: Array = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    return result


def reward_to_go(rewards: Array, gamma: float) -> Array:
    """Return G_t = r_t + γ G_{t+1}."""
    result = np.zeros(len(rewards))
    following = 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * following
        result[t] = following
    return result


def reinforce_pp(rollouts: Sequence[NumpyRollout], gamma: float) -> Array:
    return whiten(flat([reward_to_go(t.rewards, gamma) for t in rollouts]))


def reinforce_pp_baseline(rollouts: Sequence[NumpyRollout]) -> Array:
    return whiten(to_tokens(by_group(rollouts, lambda r: r if len(r) == 1 else centered(r)), rollouts))


def remax(rollouts: Sequence[NumpyRollout]) -> Array:
    return to_tokens([t.total - float(t.rollout_columns["greedy_reward"]) for t in rollouts], rollouts)


def opo(rollouts: Sequence[NumpyRollout]) -> Array:
    result = []
    for t in rollouts:
        group = [o for o in rollouts if o.group == t.group]
        tokens = sum(len(o) for o in group)
        if len(group) == 1:
            result.append(t.total)
        elif all_equal(np.array([o.total for o in group])):
            result.append(0.0)
        else:
            result.append(t.total - sum(len(o) * o.total for o in group) / max(tokens, 1))
    return to_tokens(result, rollouts)


def gpg(rollouts: Sequence[NumpyRollout], f_norm: float) -> Array:
    useful = sum(len({o.total for o in rollouts if o.group == t.group}) > 1 for t in rollouts)
    alpha = len(rollouts) / useful if useful else 0.0
    return alpha * to_tokens(by_group(rollouts, centered), rollouts) / f_norm


def maxrl(rollouts: Sequence[NumpyRollout]) -> Array:
    def of_group(r: Array) -> Array:
        return 0 * r if r.mean() == 0 or all_equal(r) else (r - r.mean()) / r.mean()

    return to_tokens(by_group(rollouts, of_group), rollouts)


def gdpo(rollouts: Sequence[NumpyRollout], weights: Sequence[float]) -> Array:
    """Scale each part within its group, add the parts up, and whiten the sums over rollouts."""
    total = np.zeros(len(rollouts))
    for p, weight in enumerate(weights):
        total += weight * np.array(grpo_of(rollouts, [float(t.rollout_columns["reward_parts"][p]) for t in rollouts]))
    return to_tokens(list(whiten(total)), rollouts)


def pass_at_k(rollouts: Sequence[NumpyRollout]) -> Array:
    """Return an advantage for the best rollout of a group only: how much the group's maximum would fall without it."""

    def of_group(r: Array) -> Array:
        result = 0 * r
        best = int(r.argmax())
        result[best] = r[best] - np.delete(r, best).max()
        return result

    return to_tokens(by_group(rollouts, of_group), rollouts)


def pkpo(rollouts: Sequence[NumpyRollout], k: int) -> Array:
    """Sum over all sets of k with i: how much their maximum falls without i."""

    def of_group(r: Array) -> Array:
        result = np.zeros(len(r))
        for chosen in combinations(range(len(r)), k):
            for i in chosen:
                rest = [r[j] for j in chosen if j != i]
                result[i] += r[list(chosen)].max() - (max(rest) if rest else 0.0)
        return result / math.comb(len(r), k)

    return to_tokens(by_group(rollouts, of_group), rollouts)


def opob(rollouts: Sequence[NumpyRollout], *, divide: bool) -> Array:
    """Return R − Σ w²ER / Σ w²E in the group. w is the rollout's π_old/μ, E the sum of its tokens' 1 − 2π + Σπ²."""
    weight = [np.exp((t["old_logp"] - t["behavior_logp"]).sum()) for t in rollouts]
    energy = [(1 - 2 * np.exp(t["old_logp"]) + t["sum_pi_squared"]).sum() for t in rollouts]
    result = []
    for t in rollouts:
        members = [u for u, other in enumerate(rollouts) if other.group == t.group]
        r = np.array([rollouts[u].total for u in members])
        strength = np.array([weight[u] ** 2 * energy[u] for u in members])
        if len(r) == 1:
            result.append(t.total)
        elif all_equal(r):
            result.append(0.0)
        else:
            advantage = t.total - (strength * r).sum() / strength.sum()
            result.append(advantage / (r.std(ddof=1) + EPSILON) if divide else advantage)
    return to_tokens(result, rollouts)


def token_baseline(rollouts: Sequence[NumpyRollout], gamma: float = 1.0) -> Array:
    """Return G_t − Σ_g G_t W_t / Σ_g W_t over the group's rollouts longer than t; the baseline of a single one is 0."""
    rewards_to_go = [reward_to_go(t.rewards, gamma) for t in rollouts]
    energy = [np.cumsum(1 - 2 * np.exp(t["old_logp"]) + t["sum_pi_squared"]) for t in rollouts]
    result = []
    for u, t in enumerate(rollouts):
        advantage = np.zeros(len(t))
        for s in range(len(t)):
            group_with_token = [o for o, other in enumerate(rollouts) if other.group == t.group and len(other) > s]
            weight = sum(energy[o][s] for o in group_with_token)
            baseline = (
                sum(rewards_to_go[o][s] * energy[o][s] for o in group_with_token) / weight
                if len(group_with_token) > 1
                else 0.0
            )
            advantage[s] = rewards_to_go[u][s] - baseline
        result.append(advantage)
    return flat(result)


def gae(rollouts: Sequence[NumpyRollout], gamma: float, lam: float, final: Sequence[float] = ()) -> tuple[Array, Array]:
    """Return the advantage and the critic's target. `final` has the value of the state after each last action."""
    result = []
    for t, after in zip(rollouts, final or [0.0] * len(rollouts), strict=True):
        value = np.append(t["value"], after)
        advantage, following = np.zeros(len(t)), 0.0
        for s in reversed(range(len(t))):
            following = t.rewards[s] + gamma * value[s + 1] - value[s] + gamma * lam * following
            advantage[s] = following
        result.append(advantage)
    return flat(result), flat([a + t["value"] for a, t in zip(result, rollouts, strict=True)])


def distillation(rollouts: Sequence[NumpyRollout]) -> Array:
    return flat([t["teacher_logp"] - t["old_logp"] for t in rollouts])


def rae(rollouts: Sequence[NumpyRollout], before: dict[int, float], decay: float) -> tuple[Array, dict[int, float]]:
    """Return R less the previous average of its role, and the new averages.

    A role's average is updated once for each of its rollouts, each time with the mean reward of the role.
    """
    means = dict(before)
    for role in {int(t.rollout_columns["role"]) for t in rollouts}:
        rewards = [t.total for t in rollouts if int(t.rollout_columns["role"]) == role]
        means.setdefault(role, 0.0)
        for _ in rewards:
            means[role] = decay * means[role] + (1 - decay) * float(np.mean(rewards))
    return to_tokens([t.total - before.get(int(t.rollout_columns["role"]), 0.0) for t in rollouts], rollouts), means
