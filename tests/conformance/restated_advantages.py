"""The advantage estimators restated in numpy, from their papers, one rollout and one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from tests.conformance.twin import Array, Try, by_group, flat, shared

EPSILON = 1e-6


def level(r: Array) -> bool:
    """All equal, in a group of two or more: nothing to learn."""
    return len(r) > 1 and bool((r == r[0]).all())


def grpo_of(of: Sequence[Try], values: Sequence[float]) -> list[float]:
    """(x − mean) / (std + ε) within the group of each rollout; x itself where it is alone."""
    found = list(values)
    for g in {t.group for t in of}:
        members = [u for u, t in enumerate(of) if t.group == g]
        r = np.array([values[u] for u in members])
        if len(r) > 1:
            r = 0 * r if level(r) else (r - r.mean()) / (r.std(ddof=1) + EPSILON)
        for u, value in zip(members, r, strict=True):
            found[u] = float(value)
    return found


def grpo(of: Sequence[Try]) -> Array:
    return shared(grpo_of(of, [t.total for t in of]), of)


def centred(r: Array) -> Array:
    """R − mean of the group."""
    return 0 * r if level(r) else r - r.mean()


def dr_grpo(of: Sequence[Try]) -> Array:
    return shared(by_group(of, centred), of)


def batch_mean(of: Sequence[Try]) -> Array:
    r = np.array([t.total for t in of])
    return shared(list(0 * r if level(r) else r - r.mean()), of)


def batch_std(of: Sequence[Try]) -> Array:
    each = np.array(by_group(of, centred))
    return shared(list(each / (each.std(ddof=1) + EPSILON)), of)


def rloo(of: Sequence[Try]) -> Array:
    def one(r: Array) -> Array:
        if len(r) == 1:
            return r
        others = np.array([np.delete(r, i).mean() for i in range(len(r))])
        return 0 * r if level(r) else r - others

    return shared(by_group(of, one), of)


def whitened(values: Array) -> Array:
    """Mean 0 and unbiased variance 1, over all the numbers given."""
    found: Array = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    return found


def to_go(rewards: Array, gamma: float) -> Array:
    """G_t = r_t + γ G_{t+1}."""
    found = np.zeros(len(rewards))
    ahead = 0.0
    for t in reversed(range(len(rewards))):
        ahead = rewards[t] + gamma * ahead
        found[t] = ahead
    return found


def reinforce_pp(of: Sequence[Try], gamma: float) -> Array:
    return whitened(flat([to_go(t.rewards, gamma) for t in of]))


def reinforce_pp_baseline(of: Sequence[Try]) -> Array:
    return whitened(shared(by_group(of, lambda r: r if len(r) == 1 else centred(r)), of))


def remax(of: Sequence[Try]) -> Array:
    return shared([t.total - float(t.facts["greedy_reward"]) for t in of], of)


def opo(of: Sequence[Try]) -> Array:
    found = []
    for t in of:
        group = [o for o in of if o.group == t.group]
        tokens = sum(len(o) for o in group)
        if len(group) == 1:
            found.append(t.total)
        elif level(np.array([o.total for o in group])):
            found.append(0.0)
        else:
            found.append(t.total - sum(len(o) * o.total for o in group) / max(tokens, 1))
    return shared(found, of)


def gpg(of: Sequence[Try], f_norm: float) -> Array:
    useful = sum(len({o.total for o in of if o.group == t.group}) > 1 for t in of)
    alpha = len(of) / useful if useful else 0.0
    return alpha * shared(by_group(of, centred), of) / f_norm


def maxrl(of: Sequence[Try]) -> Array:
    def one(r: Array) -> Array:
        return 0 * r if r.mean() == 0 or level(r) else (r - r.mean()) / r.mean()

    return shared(by_group(of, one), of)


def gdpo(of: Sequence[Try], weights: Sequence[float]) -> Array:
    """Each part on its own scale within the group, added up, whitened over rollouts."""
    total = np.zeros(len(of))
    for p, weight in enumerate(weights):
        total += weight * np.array(grpo_of(of, [float(t.facts["reward_parts"][p]) for t in of]))
    return shared(list(whitened(total)), of)


def pass_at_k(of: Sequence[Try]) -> Array:
    """The best of a group alone has an advantage: what the group's maximum would lose without it."""

    def one(r: Array) -> Array:
        found = 0 * r
        best = int(r.argmax())
        found[best] = r[best] - np.delete(r, best).max()
        return found

    return shared(by_group(of, one), of)


def pkpo(of: Sequence[Try], k: int) -> Array:
    """Over all sets of k that hold i: what their maximum loses without i."""

    def one(r: Array) -> Array:
        found = np.zeros(len(r))
        for chosen in combinations(range(len(r)), k):
            for i in chosen:
                rest = [r[j] for j in chosen if j != i]
                found[i] += r[list(chosen)].max() - (max(rest) if rest else 0.0)
        return found / math.comb(len(r), k)

    return shared(by_group(of, one), of)


def opob(of: Sequence[Try], *, divide: bool) -> Array:
    """R − Σ w²ER / Σ w²E in the group: w the rollout's π_old/μ, E the sum of its tokens' 1 − 2π + Σπ²."""
    weight = [np.exp((t["old_logp"] - t["behavior_logp"]).sum()) for t in of]
    energy = [(1 - 2 * np.exp(t["old_logp"]) + t["sum_pi_squared"]).sum() for t in of]
    found = []
    for t in of:
        members = [u for u, other in enumerate(of) if other.group == t.group]
        r = np.array([of[u].total for u in members])
        strength = np.array([weight[u] ** 2 * energy[u] for u in members])
        if len(r) == 1:
            found.append(t.total)
        elif level(r):
            found.append(0.0)
        else:
            advantage = t.total - (strength * r).sum() / strength.sum()
            found.append(advantage / (r.std(ddof=1) + EPSILON) if divide else advantage)
    return shared(found, of)


def token_baseline(of: Sequence[Try], gamma: float = 1.0) -> Array:
    """G_t − Σ_g G_t W_t / Σ_g W_t over the group's rollouts that are still going at t; nothing where only one is."""
    going = [to_go(t.rewards, gamma) for t in of]
    energy = [np.cumsum(1 - 2 * np.exp(t["old_logp"]) + t["sum_pi_squared"]) for t in of]
    found = []
    for u, t in enumerate(of):
        advantage = np.zeros(len(t))
        for s in range(len(t)):
            alive = [o for o, other in enumerate(of) if other.group == t.group and len(other) > s]
            weight = sum(energy[o][s] for o in alive)
            baseline = sum(going[o][s] * energy[o][s] for o in alive) / weight if len(alive) > 1 else 0.0
            advantage[s] = going[u][s] - baseline
        found.append(advantage)
    return flat(found)


def gae(of: Sequence[Try], gamma: float, lam: float, final: Sequence[float] = ()) -> tuple[Array, Array]:
    """The advantage and the critic's target; `final`: what the state after each rollout's last action is worth."""
    found = []
    for t, after in zip(of, final or [0.0] * len(of), strict=True):
        value = np.append(t["value"], after)
        advantage, ahead = np.zeros(len(t)), 0.0
        for s in reversed(range(len(t))):
            ahead = t.rewards[s] + gamma * value[s + 1] - value[s] + gamma * lam * ahead
            advantage[s] = ahead
        found.append(advantage)
    return flat(found), flat([a + t["value"] for a, t in zip(found, of, strict=True)])


def distillation(of: Sequence[Try]) -> Array:
    return flat([t["teacher_logp"] - t["old_logp"] for t in of])


def rae(of: Sequence[Try], before: dict[int, float], decay: float) -> tuple[Array, dict[int, float]]:
    """R less the average of its role as it stood, and the averages afterwards: one update for each rollout of the role,
    each with the mean of what the role earned."""
    means = dict(before)
    for role in {int(t.facts["role"]) for t in of}:
        earned = [t.total for t in of if int(t.facts["role"]) == role]
        means.setdefault(role, 0.0)
        for _ in earned:
            means[role] = decay * means[role] + (1 - decay) * float(np.mean(earned))
    return shared([t.total - before.get(int(t.facts["role"]), 0.0) for t in of], of), means
