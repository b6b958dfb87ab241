"""A laboratory of mismatch: a toy that a sampler unlike the policy can spoil, trained by each correction.

An answer has two tokens of eight, with luck between them: +1 or −1, by chance. A right token earns 0.3. So the second
token is chosen in one of sixteen states, and behind luck nearly all of the advantage has nothing to do with the choice.
The policy is a table of logits. A step follows the exact expected gradient, so that what is seen is the bias of a
correction, and none of its noise. All samplers and seeds are computed at once; `test_laboratory.py` compares a step of
each correction with that of the product's own objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.algorithms import AlgorithmConfig
from etude.algorithms.advantages.group import RLOO
from etude.algorithms.corrections import CorrectionConfig
from etude.algorithms.losses import LOSSES

Array: TypeAlias = NDArray[np.float64]

TOKENS = 8
STATES = 1 + 2 * TOKENS
"""The first token's, then one for each first token and luck."""
SEEDS = 4
STEPS = 3000
LEARNING_RATE = 0.5
REWARD = 0.3
LUCK = np.array([-1.0, 1.0])
DELAY = 100
"""The age of the stale sampler, in steps."""
DRIFT_STEP = 100
"""The step at which drift is measured."""
MIN_P = 0.1
ERROR = 0.3
GRID = 0.5


def softmax(logits: Array) -> Array:
    grown: Array = np.exp(logits - logits.max(-1, keepdims=True))
    return grown / grown.sum(-1, keepdims=True)


# -- the samplers -----------------------------------------------------------------------------------------------------


def equal(now: Array, _old: Array, _errors: Array) -> Array:
    return now


def fixed_errors(now: Array, _old: Array, errors: Array) -> Array:
    return now + ERROR * errors


def rounded(now: Array, _old: Array, _errors: Array) -> Array:
    return np.asarray(np.round(now / GRID) * GRID)


def colder(now: Array, _old: Array, _errors: Array) -> Array:
    return now / 0.9


def warmer(now: Array, _old: Array, _errors: Array) -> Array:
    return now / 1.1


def stale(_now: Array, old: Array, _errors: Array) -> Array:
    return old


def cutting(now: Array, _old: Array, _errors: Array) -> Array:
    return np.where(now >= now.max(-1, keepdims=True) + np.log(MIN_P), now, -np.inf)


SAMPLERS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "equal": equal,
    f"errors of {ERROR}": fixed_errors,
    f"rounded to {GRID}": rounded,
    "temperature 0.9": colder,
    "temperature 1.1": warmer,
    f"{DELAY} steps old": stale,
    f"`min_p={MIN_P}`": cutting,
}
"""The logits that a sampler uses, of the policy's now and `DELAY` steps ago, and of errors that never change."""

# -- the corrections --------------------------------------------------------------------------------------------------

Weigh = Callable[[Array, Array, int], Array]
"""q·w·g of each token: from the probabilities p of the policy and q of the sampler, and the sign of the advantage."""


def no_weight(_p: Array, q: Array, _sign: int) -> Array:
    return q


def truncated(high: float) -> Weigh:
    return lambda p, q, _sign: np.minimum(p, high * q)


def masked(low: float, high: float) -> Weigh:
    return lambda p, q, _sign: np.where((p >= low * q) & (p <= high * q), p, 0.0)


def clipped(p: Array, q: Array, sign: int) -> Array:
    """PPO's: the ratio p/q, and nothing where it has moved too far in the direction of the advantage."""
    is_clipped = p > 1.2 * q if sign > 0 else p < 0.8 * q
    return np.where(is_clipped | (q == 0), 0.0, p)


@dataclass(frozen=True, eq=False)
class Treatment:
    """One correction: as a formula here, and as the options of a run."""

    name: str
    options: str
    weigh: Weigh
    correction: dict[str, Any] = field(default_factory=dict)
    loss: str = "reinforce"
    recorded: int = 0
    """The number of tokens that centering knows; 0 is no centering."""
    over_sets: bool = False
    """The policy is taken over the tokens that the sampler could draw."""

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The same as the product's own object."""
        if self.recorded:
            options = CorrectionConfig(**self.correction, center=True, alternatives=self.recorded)
        else:
            options = CorrectionConfig(**self.correction)
        return AlgorithmConfig(
            advantage=RLOO(), loss=LOSSES[self.loss](reduction="seq-mean-token-sum"), correction=options
        )

    def coefficients(self, p: Array, q: Array, above: Array, below: Array) -> Array:
        """Return the coefficient of each token's ∇log p, in expectation over a visit of its state.

        above, below: the positive and the negative part of a token's advantage, in expectation.
        """
        moved = self.weigh(p, q, 1)
        if not self.recorded:
            return moved * above + self.weigh(p, q, -1) * below
        expected = moved
        if self.recorded < TOKENS:
            known = np.argsort(np.argsort(-q, -1, kind="stable"), -1) < self.recorded
            rest_p = np.where(known, 0.0, p).sum(-1, keepdims=True)
            rest_q = np.where(known, 0.0, q).sum(-1, keepdims=True)
            share = p / np.maximum(rest_p, np.finfo(np.float64).tiny)
            expected = np.where(known, moved, self.weigh(rest_p, rest_q, 1) * share)
        mean: Array = (q * (above + below)).sum(-1, keepdims=True)
        return moved * (above + below) - expected * mean


TREATMENTS = (
    Treatment("no correction", "", no_weight),
    Treatment("over the recorded sets", "`sampling.min_p`", no_weight, over_sets=True),
    Treatment("PPO's clip around the sampler", "`correction.policies=two`", clipped, {"policies": "two"}, loss="ppo"),
    Treatment(
        "narrow mask",
        "`weight=mask low=0.8 high=1.25`",
        masked(0.8, 1.25),
        {"weight": "mask", "low": 0.8, "high": 1.25},
    ),
    Treatment("mask", "`weight=mask`", masked(0.5, 5.0), {"weight": "mask"}),
    Treatment("weights up to 1.2", "`weight=truncate high=1.2`", truncated(1.2), {"weight": "truncate", "high": 1.2}),
    Treatment("weights up to 2", "`weight=truncate`", truncated(2.0), {"weight": "truncate"}),
    Treatment("centering, 2 tokens", "`center=true alternatives=2`", no_weight, recorded=2),
    Treatment("centering, 4 tokens", "`center=true alternatives=4`", no_weight, recorded=4),
    Treatment("centering, all tokens", "`center=true`", no_weight, recorded=TOKENS),
    Treatment(
        "centering and weights up to 1.2",
        "`center=true weight=truncate high=1.2`",
        truncated(1.2),
        {"weight": "truncate", "high": 1.2},
        recorded=TOKENS,
    ),
)

# -- the toy ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toy:
    """Tasks of some seeds: the right tokens, the sampler's errors, and the first logits. Each [N, 17, 8]."""

    right: Array
    errors: Array
    logits: Array

    @classmethod
    def make(cls, seeds: int = SEEDS) -> Toy:
        sources = [np.random.default_rng(seed) for seed in range(seeds)]
        errors = np.stack([source.standard_normal((STATES, TOKENS)) for source in sources])
        right = np.stack([np.eye(TOKENS)[source.integers(TOKENS, size=STATES)] for source in sources])
        return cls(right, errors, np.stack([0.5 * source.standard_normal((STATES, TOKENS)) for source in sources]))

    def returns(self) -> Array:
        """[N, 8, 2, 8]: return the reward of each first token, luck and second token."""
        second = self.right[:, 1:].reshape(-1, TOKENS, 2, TOKENS)
        first = self.right[:, 0, :, None, None]
        return np.asarray(REWARD * (first + second) + LUCK[:, None])

    def visits(self, q: Array) -> Array:
        """[…, 17]: return the probability that each state is visited."""
        return np.concatenate([np.ones((*q.shape[:-2], 1)), np.repeat(q[..., 0, :], 2, -1) / 2], -1)

    def advantages(self, q: Array) -> tuple[Array, Array]:
        """[…, 17, 8] of each: return the positive and the negative part of a token's advantage, in expectation.

        The baseline is the mean return of the sampler's answers.
        """
        returns = self.returns()
        second = q[..., 1:, :].reshape(*q.shape[:-2], TOKENS, 2, TOKENS)
        of_pair = second * q[..., 0, :, None, None] / 2
        gap = returns - (of_pair * returns).sum((-3, -2, -1))[..., None, None, None]
        parts = []
        for part in (np.maximum(gap, 0.0), np.minimum(gap, 0.0)):
            of_first = (second * part).sum((-2, -1)) / 2
            parts.append(
                np.concatenate([of_first[..., None, :], part.reshape((*q.shape[:-2], STATES - 1, TOKENS))], -2)
            )
        return parts[0], parts[1]

    def right_share(self, q: Array) -> Array:
        """[…]: return the share of right tokens among those that are drawn."""
        return np.asarray((self.visits(q)[..., None] * q * self.right).sum((-2, -1)) / 2)


@dataclass(frozen=True)
class Outcome:
    """The result of one treatment for each sampler, averaged over the seeds."""

    drift: Array
    """[samplers]: the probability that a step of size 1 would move, if no token were better than another."""
    right: Array
    """[samplers]: the share of right tokens that the sampler draws at the end."""
    curve: Array
    """[points, samplers]: the same every `CURVE_STEP` steps."""


CURVE_STEP = 50


def gradient(treatment: Treatment, p: Array, q: Array, above: Array, below: Array) -> Array:
    """Return the step's direction in the logits of one state's visit."""
    coefficients = treatment.coefficients(p, q, above, below)
    return coefficients - coefficients.sum(-1, keepdims=True) * p


def measure_drift(treatment: Treatment, p: Array, q: Array, visits: Array) -> Array:
    """[…]: return the probability that a step of size 1 moves at a token if all are equally good, or equally bad."""
    one = np.ones_like(q)
    zero = np.zeros_like(q)
    good = np.abs(gradient(treatment, p, q, one, zero)).sum(-1) / 2
    bad = np.abs(gradient(treatment, p, q, zero, -one)).sum(-1) / 2
    return np.asarray((visits * (good + bad) / 2).sum(-1) / 2)


def run(treatment: Treatment, toy: Toy, steps: int = STEPS) -> Outcome:
    """Train on the toy with every sampler."""
    logits = np.broadcast_to(toy.logits, (len(SAMPLERS), *toy.logits.shape)).copy()
    past: list[Array] = []
    curve = []
    drift = np.zeros(len(SAMPLERS))
    for step in range(steps + 1):
        past = [*past[-DELAY:], logits]
        sampled = np.stack(
            [of(now, old, toy.errors) for of, now, old in zip(SAMPLERS.values(), logits, past[0], strict=True)]
        )
        q = softmax(sampled)
        p = softmax(np.where(q > 0, logits, -np.inf)) if treatment.over_sets else softmax(logits)
        visits = toy.visits(q)
        if step == DRIFT_STEP:
            drift = measure_drift(treatment, p, q, visits).mean(1)
        if step % CURVE_STEP == 0:
            curve.append(toy.right_share(q).mean(1))
        above, below = toy.advantages(q)
        logits = logits + LEARNING_RATE * visits[..., None] * gradient(treatment, p, q, above, below)
    return Outcome(drift, curve[-1], np.stack(curve))
