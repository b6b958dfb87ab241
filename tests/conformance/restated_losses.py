"""The policy losses restated in numpy: one number per token, with explicit stop-gradient factors.

Each formula reads `x.logp` where the paper differentiates, and `x.frozen` where it does not. Both are the same numbers.
Finite differences change only `x.logp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from etude.batch import Batch
from tests.conformance.twin import Array, numpy_rollouts

Formula = Callable[["Tokens"], Array]


@dataclass(frozen=True)
class Tokens:
    """Columns of the action tokens [A], and the lengths of the rollouts."""

    logp: Array  # log π_θ, differentiated
    frozen: Array  # log π_θ, not differentiated
    old: Array
    mu: Array
    advantage: Array
    lengths: list[int]
    chosen: Array

    @property
    def ratio(self) -> Array:
        """Return r = π_θ / π_old."""
        return np.exp(self.logp - self.old)

    def mean(self, values: Array) -> Array:
        """[A] → [A]: return the mean over each token's rollout."""
        ends = np.cumsum(self.lengths)
        parts = [np.full(n, values[e - n : e].mean()) for e, n in zip(ends, self.lengths, strict=True) if n]
        return np.concatenate([np.zeros(0), *parts])

    def sum(self, values: Array) -> Array:
        result: Array = self.mean(values) * np.repeat(np.array(self.lengths), self.lengths)
        return result


def finite_differences(formula: Callable[[Array], float], at: Array, h: float = 1e-3) -> Array:
    """Return the derivative of the formula in each entry, by a central difference of fourth order."""

    def evaluate(i: int, step: float) -> float:
        x = at.copy()
        x.flat[i] += step
        return formula(x)

    prox_logp = np.array([evaluate(i, h) - evaluate(i, -h) for i in range(at.size)])
    double_step = np.array([evaluate(i, 2 * h) - evaluate(i, -2 * h) for i in range(at.size)])
    result: Array = ((8 * prox_logp - double_step) / (12 * h)).reshape(at.shape)
    return result


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
        result: Array = -x.advantage * (4 / tau) / (1 + np.exp(-tau * (x.ratio - 1)))
        return result

    return formula


def gmpo(bound: float) -> Formula:
    """Give the rollout's number to each of its tokens, so that their mean is that number."""

    def formula(x: Tokens) -> Array:
        log_ratio = x.logp - x.old
        clipped_log_ratio = np.where(x.advantage > 0, np.minimum(log_ratio, bound), np.maximum(log_ratio, -bound))
        return -x.advantage * np.exp(x.mean(clipped_log_ratio))

    return formula


def dppo(divergence: str, low: float, high: float, cap: float) -> Formula:
    def formula(x: Tokens) -> Array:
        pi, mu = np.exp(x.frozen), np.exp(x.mu)
        moves_away = np.where(x.advantage > 0, pi > mu, pi < mu) & (x.advantage != 0)
        divergence_of_token = (
            np.abs(pi - mu) if divergence == "tv" else mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi))
        )
        keep = ~(moves_away & (divergence_of_token > np.where(x.advantage > 0, high, low)))
        result: Array = -x.advantage * np.minimum(pi / mu, cap) * x.logp * keep
        return result

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
    """Use π_old as π_prox, or with α a point on the straight line from log μ to log π_θ."""

    def formula(x: Tokens) -> Array:
        prox_logp = x.old if alpha is None else x.mu + alpha * (x.frozen - x.mu)
        return np.exp(prox_logp - x.mu) * clipped(np.exp(x.logp - prox_logp), x.advantage, low, high)

    return formula


def vespo(positive: tuple[float, float], negative: tuple[float, float]) -> Formula:
    """Choose (k, λ) by the sign of the advantage."""

    def formula(x: Tokens) -> Array:
        w = np.exp(x.sum(x.frozen - x.mu))
        k, decay = (np.where(x.advantage > 0, a, b) for a, b in zip(positive, negative, strict=True))
        result: Array = -(w**k) * np.exp(decay * (1 - w)) * x.advantage * x.logp
        return result

    return formula


def ipo(bound: float) -> Formula:
    def formula(x: Tokens) -> Array:
        prox_logp = np.abs(np.exp(x.frozen) - np.exp(x.mu)) <= bound
        return -x.advantage * np.exp(x.logp - x.mu) * prox_logp

    return formula


def flash_reinforce(bound: float) -> Formula:
    """Keep a rollout if the mean over its tokens of KL(μ ‖ π_θ) is within the bound: this token against all others."""

    def formula(x: Tokens) -> Array:
        mu, pi = np.exp(x.mu), np.exp(x.frozen)
        divergence = mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi))
        return -x.advantage * np.exp(x.logp - x.mu) * (x.mean(divergence) <= bound)

    return formula


def m2po(x: Tokens) -> Array:
    return np.where(x.chosen > 0, 0.0, -x.advantage * np.exp(x.logp - x.mu))


def splitmix(x: int) -> int:
    """Compute splitmix64 of an unsigned 64-bit integer."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def token_hashes(batch: Batch, *, seed: int, step: int) -> list[int]:
    """[A]: return the hash of (seed, step, rollout, position among the rollout's actions), as a signed integer."""
    result = []
    for rollout in numpy_rollouts(batch):
        for position in range(len(rollout)):
            key = splitmix(splitmix(seed) ^ step)
            key = splitmix(key ^ int(rollout.rollout_columns["rollout_id"]))
            key = splitmix(key ^ position)
            result.append(key - 2**64 if key >= 2**63 else key)
    return result


def reduce_terms(terms: Array, lengths: list[int], how: str, constant: float | None = None) -> float:
    """Reduce the numbers of all tokens to one loss, for an update batch of these rollouts."""
    ends = np.cumsum(lengths)
    parts = [terms[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    if how == "token-mean":
        return float(terms.sum() / len(terms))
    if how == "token-sum":
        return float(terms.sum())
    sums = [part.sum() / (len(part) if how == "seq-mean-token-mean" and len(part) else 1) for part in parts]
    return float(sum(sums) / len(lengths) / (1 if constant is None else constant))
