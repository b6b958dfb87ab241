"""The policy losses restated in numpy: one number a token, with the factors that carry no gradient written out.

Each formula reads `x.logp` where the paper differentiates and `x.frozen` where it does not: the same numbers, of which
only the first are moved when the gradient is taken by finite differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from etude.batch import Batch
from tests.conformance.twin import Array, tries

Formula = Callable[["Tokens"], Array]


@dataclass(frozen=True)
class Tokens:
    """Columns of the action tokens [A], and the stretches that are rollouts."""

    logp: Array  # log π_θ, differentiated
    frozen: Array  # log π_θ, not differentiated
    old: Array
    mu: Array
    advantage: Array
    lengths: list[int]
    chosen: Array

    @property
    def ratio(self) -> Array:
        """r = π_θ / π_old."""
        return np.exp(self.logp - self.old)

    def mean(self, values: Array) -> Array:
        """[A] → [A]: the mean over the token's rollout."""
        ends = np.cumsum(self.lengths)
        parts = [np.full(n, values[e - n : e].mean()) for e, n in zip(ends, self.lengths, strict=True) if n]
        return np.concatenate([np.zeros(0), *parts])

    def sum(self, values: Array) -> Array:
        found: Array = self.mean(values) * np.repeat(np.array(self.lengths), self.lengths)
        return found


def slope(formula: Callable[[Array], float], at: Array, h: float = 1e-3) -> Array:
    """The derivative of the formula in each entry, by a central difference of fourth order."""

    def moved(i: int, by: float) -> float:
        x = at.copy()
        x.flat[i] += by
        return formula(x)

    near = np.array([moved(i, h) - moved(i, -h) for i in range(at.size)])
    wide = np.array([moved(i, 2 * h) - moved(i, -2 * h) for i in range(at.size)])
    found: Array = ((8 * near - wide) / (12 * h)).reshape(at.shape)
    return found


def clipped(ratio: Array, advantage: Array, low: float, high: float, dual: float | None = None) -> Array:
    loss = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 1 - low, 1 + high))
    if dual is not None:
        loss = np.where(advantage < 0, np.minimum(loss, -advantage * dual), loss)
    return loss


def ppo(low: float, high: float, dual: float | None) -> Formula:
    return lambda x: clipped(x.ratio, x.advantage, low, high, dual)


def gspo(low: float, high: float) -> Formula:
    def formula(x: Tokens) -> Array:
        s = np.exp(x.mean(x.frozen - x.old))
        return clipped(s * np.exp(x.logp - x.frozen), x.advantage, low, high)

    return formula


def cispo(low: float, high: float) -> Formula:
    return lambda x: -np.clip(np.exp(x.frozen - x.old), low, high) * x.advantage * x.logp


def sapo(tau_positive: float, tau_negative: float) -> Formula:
    def formula(x: Tokens) -> Array:
        tau = np.where(x.advantage > 0, tau_positive, tau_negative)
        found: Array = -x.advantage * (4 / tau) / (1 + np.exp(-tau * (x.ratio - 1)))
        return found

    return formula


def gmpo(bound: float) -> Formula:
    """The rollout's one number, given to each of its tokens: its token-mean is that number again."""

    def formula(x: Tokens) -> Array:
        told = x.logp - x.old
        cut = np.where(x.advantage > 0, np.minimum(told, bound), np.maximum(told, -bound))
        return -x.advantage * np.exp(x.mean(cut))

    return formula


def dppo(divergence: str, low: float, high: float, cap: float) -> Formula:
    def formula(x: Tokens) -> Array:
        pi, mu = np.exp(x.frozen), np.exp(x.mu)
        away = np.where(x.advantage > 0, pi > mu, pi < mu) & (x.advantage != 0)
        far = np.abs(pi - mu) if divergence == "tv" else mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi))
        keep = ~(away & (far > np.where(x.advantage > 0, high, low)))
        found: Array = -x.advantage * np.minimum(pi / mu, cap) * x.logp * keep
        return found

    return formula


def clip_cov(low: float, high: float) -> Formula:
    return lambda x: np.where(x.chosen > 0, 0.0, clipped(x.ratio, x.advantage, low, high))


def kl_cov(coefficient: float) -> Formula:
    return lambda x: -x.advantage * x.ratio + np.where(x.chosen > 0, coefficient * np.abs(x.logp - x.old), 0.0)


def dro(beta: float) -> Formula:
    return lambda x: -(x.advantage * x.logp - beta / 2 * (x.logp - x.old) ** 2)


def reinforce(x: Tokens) -> Array:
    return -x.advantage * x.logp


def capped_reinforce(cap: float) -> Formula:
    return lambda x: -np.minimum(np.exp(x.frozen - x.mu), cap) * x.advantage * x.logp


def decoupled_ppo(low: float, high: float, alpha: Array | None) -> Formula:
    """π_prox is π_old, or (given α) on the straight line from log μ to log π_θ."""

    def formula(x: Tokens) -> Array:
        near = x.old if alpha is None else x.mu + alpha * (x.frozen - x.mu)
        return np.exp(near - x.mu) * clipped(np.exp(x.logp - near), x.advantage, low, high)

    return formula


def vespo(positive: tuple[float, float], negative: tuple[float, float]) -> Formula:
    """(k, λ) by the sign of the advantage."""

    def formula(x: Tokens) -> Array:
        w = np.exp(x.sum(x.frozen - x.mu))
        k, decay = (np.where(x.advantage > 0, a, b) for a, b in zip(positive, negative, strict=True))
        found: Array = -(w**k) * np.exp(decay * (1 - w)) * x.advantage * x.logp
        return found

    return formula


def ipo(bound: float) -> Formula:
    def formula(x: Tokens) -> Array:
        near = np.abs(np.exp(x.frozen) - np.exp(x.mu)) <= bound
        return -x.advantage * np.exp(x.logp - x.mu) * near

    return formula


def flash_reinforce(bound: float) -> Formula:
    """A rollout counts if the mean over its tokens of KL(μ ‖ π_θ), this token against any other, is within it."""

    def formula(x: Tokens) -> Array:
        mu, pi = np.exp(x.mu), np.exp(x.frozen)
        divergence = mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi))
        return -x.advantage * np.exp(x.logp - x.mu) * (x.mean(divergence) <= bound)

    return formula


def m2po(x: Tokens) -> Array:
    return np.where(x.chosen > 0, 0.0, -x.advantage * np.exp(x.logp - x.mu))


def splitmix(x: int) -> int:
    """splitmix64 on an unsigned 64-bit integer."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def token_hashes(batch: Batch, *, seed: int, step: int) -> list[int]:
    """[A]: the hash of (seed, step, rollout, position among the rollout's actions), as a signed integer."""
    found = []
    for one in tries(batch):
        for position in range(len(one)):
            key = splitmix(splitmix(seed) ^ step)
            key = splitmix(key ^ int(one.facts["rollout_id"]))
            key = splitmix(key ^ position)
            found.append(key - 2**64 if key >= 2**63 else key)
    return found


def reduced(terms: Array, lengths: list[int], how: str, constant: float | None = None) -> float:
    """One loss of all tokens' numbers, for an update batch of these rollouts."""
    ends = np.cumsum(lengths)
    parts = [terms[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    if how == "token-mean":
        return float(terms.sum() / len(terms))
    if how == "token-sum":
        return float(terms.sum())
    each = [part.sum() / (len(part) if how == "seq-mean-token-mean" and len(part) else 1) for part in parts]
    return float(sum(each) / len(lengths) / (1 if constant is None else constant))
