"""Losses that preserve the entropy, by another treatment of the few tokens with high covariance of A and log-prob.

cov = (A − mean A)(log π_old − mean log π_old), means over the action tokens of the whole rollout batch. Raising likely
tokens and lowering unlikely ones reduces a policy's entropy, and a few tokens cause most of it. They are chosen once,
before the update and over all ranks, so that neither the loss nor its gradient depends on micro-batches. A random pick
orders the tokens by a hash of (seed, step, rollout, position). The hash depends on a token's identity and not on its
index, so order, packing and ranks cannot change the pick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from etude.algorithms.base import PolicyLoss, log_ratio
from etude.algorithms.losses.clip import ClippedLoss, surrogate
from etude.algorithms.view import Ranks, View, flatnonzero
from etude.errors import ConfigError
from etude.lazy import torch
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor

# The constants of splitmix64, as signed 64-bit integers: torch has no unsigned ones that multiply.
STEP = -0x61C8864680B583EB
FIRST = -0x40A7B892E31B1A47
SECOND = -0x6B2FB644ECCEEE15


def covariance(advantage: Tensor, old_logp: Tensor, ranks: Ranks) -> tuple[Tensor, int]:
    """[A] float64: (A − mean)(log π_old − mean) with means over all ranks; and the number of tokens of all ranks."""
    a, p = advantage.double(), old_logp.double()
    sums = ranks.all_reduce(torch.stack([a.sum(), p.sum(), a.new_tensor(float(len(a)))]))
    means = sums[:2] / sums[2].clamp(min=1)
    return (a - means[0]) * (p - means[1]), int(sums[2])


def clip_cov(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, chosen: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's surrogate, 0 for the chosen tokens, and a mask of the others that the ordinary clip cut."""
    ratio = log_ratio(logp, old_logp).exp()
    return surrogate(ratio, advantage.masked_fill(chosen, 0.0), clip_low=clip_low, clip_high=clip_high)


def kl_cov(logp: Tensor, old_logp: Tensor, advantage: Tensor, chosen: Tensor, *, coefficient: float) -> Tensor:
    """Return −A·r, plus coefficient·|log r| for the chosen tokens."""
    loss = -advantage * log_ratio(logp, old_logp).exp()
    return torch.where(chosen, loss + coefficient * (logp - old_logp).abs(), loss)


def quota(share: float, tokens: int) -> int:
    """Return the number of tokens in a share: rounded down, but at least one."""
    return max(1, int(share * tokens))


def splitmix64(x: Tensor) -> Tensor:
    """Apply splitmix64 to each entry: a bijection of 64-bit integers with outputs that look random."""
    x = x + STEP
    x = (x ^ _logical_shift_right(x, 30)) * FIRST
    x = (x ^ _logical_shift_right(x, 27)) * SECOND
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right with zeros from the left, as on unsigned integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def token_hashes(view: View, where: Tensor, *, seed: int, step: int) -> Tensor:
    """[n]: a random number for each of these action tokens (indices in [A]), independent of the index itself."""
    offsets = view.rollouts.offsets
    rollout = torch.searchsorted(offsets, where, right=True) - 1
    key = splitmix64(splitmix64(torch.tensor(seed, device=where.device)) ^ step)
    key = splitmix64(key ^ view.batch.require("rollout_id", needed_by="A random choice").long()[rollout])
    return splitmix64(key ^ (where - offsets[rollout]))


def select_lowest(keys: Tensor, count: int, ranks: Ranks) -> Tensor:
    """[n] bool: the keys that are among the `count` lowest over all ranks."""
    best = ranks.all_gather(keys.topk(min(count, len(keys)), largest=False).values)
    if len(best) < count:
        return torch.ones_like(keys, dtype=torch.bool)
    return keys <= best.kthvalue(count).values


def select_highest(view: View, values: Tensor, count: int, *, seed: int, step: int) -> Tensor:
    """[A] bool: the `count` highest values over all ranks; of equal values at the threshold, the lowest hashes."""
    best = view.ranks.all_gather(values.topk(min(count, len(values))).values)
    if len(best) < count:
        return torch.ones_like(values, dtype=torch.bool)
    edge = best.topk(count).values[-1]
    picked = values > edge
    left = count - int(view.ranks.all_reduce(picked.sum()))
    tied = (values == edge).nonzero()[:, 0]
    picked[tied] = select_lowest(token_hashes(view, tied, seed=seed, step=step), left, view.ranks)
    return picked


class ClipCov(ClippedLoss):
    """Clip-Cov: PPO's surrogate (no dual clip) with a few tokens of high covariance left out at random.

    Source: 2505.22617; share 2e-4 and the band (1, 5) are the paper's. It picks `share` of all action tokens of the
    rollout batch, at least one, among those whose covariance is in the band. Assumes that a few of them, picked at
    random, are enough to keep the entropy up.
    Ours: picked once a step over all ranks by a hash of (seed, step, rollout, position).
    """

    share: float = Field(2e-4, gt=0, le=1, description="share of all action tokens that is left out")
    cov_low: float = Field(1.0, description="the covariance above which a token may be left out")
    cov_high: float = Field(5.0, description="the covariance below which a token may be left out")

    @model_validator(mode="after")
    def _band_is_open(self) -> ClipCov:
        if self.cov_low >= self.cov_high:
            raise ConfigError(
                f"`cov_low` is {self.cov_low:g} and `cov_high` is {self.cov_high:g}: no covariance is between them. "
                f"Set cov_low < cov_high (1 and 5 are usual)."
            )
        return self

    def required_columns(self) -> frozenset[str]:
        return super().required_columns() | {"rollout_id", "chosen"}

    def choose_tokens(self, view: View, *, seed: int, step: int) -> Tensor:
        cov, tokens = covariance(view.column("advantage"), view.column("old_logp"), view.ranks)
        within = flatnonzero((cov > self.cov_low) & (cov < self.cov_high))
        keys = token_hashes(view, within, seed=seed, step=step)
        chosen = torch.zeros_like(cov, dtype=torch.bool)
        chosen[within] = select_lowest(keys, quota(self.share, tokens), view.ranks)
        return chosen

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        old, advantage = view.column("old_logp"), view.column("advantage")
        chosen = view.column("chosen", needed_by="Clip-Cov")
        loss, cut = clip_cov(view.logp, old, advantage, chosen, clip_low=self.clip_low, clip_high=self.clip_high)
        return loss, Metrics(
            {
                "clip_share": Mean.over(cut.count_nonzero(), len(cut)),
                "chosen_share": Mean.over(chosen.count_nonzero(), len(chosen)),
            }
        )


class KLCov(PolicyLoss):
    """KL-Cov: −A·r, with c·|log r| added on the tokens of highest covariance.

    Source: 2505.22617; the share 2e-4 and c = 1 are the paper's. Assumes that it is enough to hold the few tokens that
    reduce the entropy, and that no others need a clip. The gradient of |log r| has one size for any distance. At r = 1
    it is 0, so the first update of a step is the plain one.
    Ours: the top share is taken once a step over all ranks. Ties are broken by a hash of (seed, step, rollout,
    position). |log r| is not exponentiated and so not clamped.
    """

    share: float = Field(2e-4, gt=0, le=1, description="share of all action tokens that is held to π_old")
    coefficient: float = Field(1.0, gt=0, description="weight of the KL that holds these tokens to π_old")

    def required_columns(self) -> frozenset[str]:
        return super().required_columns() | {"rollout_id", "chosen"}

    def choose_tokens(self, view: View, *, seed: int, step: int) -> Tensor:
        cov, tokens = covariance(view.column("advantage"), view.column("old_logp"), view.ranks)
        return select_highest(view, cov, quota(self.share, tokens), seed=seed, step=step)

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        old, advantage = view.column("old_logp"), view.column("advantage")
        chosen = view.column("chosen", needed_by="KL-Cov")
        loss = kl_cov(view.logp, old, advantage, chosen, coefficient=self.coefficient)
        return loss, Metrics({"chosen_share": Mean.over(chosen.count_nonzero(), len(chosen))})
