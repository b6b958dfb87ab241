"""Losses that measure the distance from the sampler and drop the tokens that moved too far from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from etude.algorithms.base import PolicyLoss, log_ratio
from etude.algorithms.losses.reinforce import capped_ratio, reinforce
from etude.algorithms.reduce import Reduction
from etude.algorithms.segments import Segments
from etude.algorithms.view import Ranks, View
from etude.lazy import torch
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["tv", "kl"]
THRESHOLDS: dict[Divergence, float] = {"tv": 0.2, "kl": 0.05}


def dppo_drops(
    logp: Tensor, behavior_logp: Tensor, advantage: Tensor, *, divergence: Divergence, low: float, high: float
) -> Tensor:
    """[A] bool: the tokens whose probability moved further from μ than allowed, in the direction of A.

    high: the largest rise where A > 0. low: the largest fall where A < 0.
    """
    with torch.no_grad():
        p, mu = logp.exp(), behavior_logp.exp()
        outward = (p - mu) * advantage.sign()
        bound = torch.where(advantage > 0, p.new_tensor(high), p.new_tensor(low))
        if divergence == "tv":
            return outward > bound
        return (outward > 0) & (binary_kl(logp, behavior_logp) > bound)


def binary_kl(logp: Tensor, behavior_logp: Tensor) -> Tensor:
    """[A]: KL(μ ‖ π_θ) of the two-outcome distributions (this token, any other), without gradient."""
    with torch.no_grad():
        mu, least = behavior_logp.exp(), torch.finfo(logp.dtype).tiny
        others, others_mu = (-torch.expm1(x).clamp(max=-least) for x in (logp, behavior_logp))
        return mu * (behavior_logp - logp) + others_mu * (others_mu / others).log()


def ipo_drops(logp: Tensor, behavior_logp: Tensor, bound: float) -> Tensor:
    """[A] bool: the tokens with |π_θ − μ| above the bound, for either sign of A."""
    return (logp.detach().exp() - behavior_logp.exp()).abs() > bound


def flash_drops(logp: Tensor, behavior_logp: Tensor, units: Segments, bound: float) -> Tensor:
    """[A] bool: the tokens of units with a mean KL(μ ‖ π_θ), two-outcome, above the bound."""
    return units.broadcast(units.mean(binary_kl(logp, behavior_logp)) > bound)


def masked_ratio(logp: Tensor, behavior_logp: Tensor, advantage: Tensor, dropped: Tensor) -> Tensor:
    """Return −A·w, w = π_θ / μ; 0 for the dropped tokens."""
    return -advantage.masked_fill(dropped, 0.0) * log_ratio(logp, behavior_logp).exp()


def outliers(distance: Tensor, bound: float, ranks: Ranks) -> Tensor:
    """[A] bool: the largest entries, as few as bring the mean of the others, over all ranks, down to the bound.

    Entries within the bound are never among them, so only the rest are sorted. Equal entries are treated the same.
    """
    far = distance > bound
    near = torch.where(far, 0.0, distance)
    total, count = ranks.all_reduce(torch.stack([near.sum(), (~far).sum().to(near.dtype)]))
    ordered = ranks.all_gather(distance[far]).sort().values
    kept = torch.arange(1, len(ordered) + 1, device=distance.device) + count
    over = (total + ordered.cumsum(0)) / kept > bound
    if not bool(over.any()):
        return torch.zeros_like(far)
    return distance >= ordered[over][0]


class DPPO(PolicyLoss):
    """Divergence PPO: −sg(min(w, 20))·A·log π_θ·keep, w = π_θ / μ, with a trust region of probabilities, not of ratios.

    Source: 2602.04879 (binary approximation); two thresholds as in its authors' code. A token is dropped if its
    probability moved too far from μ in the direction of A. That is up by more than `threshold_high` where A > 0, down
    by more than `threshold_low` where A < 0. The distance is |π_θ − μ| for `tv`; for `kl` it is the divergence
    KL(μ ‖ π_θ) of the two-outcome distributions (this token, any other). Assumes that probability mass matters: a rare
    token may double freely, a common one may not. The ratio is against the sampler, so a correction of the mismatch
    must not weigh again.
    """

    is_tokenwise = True

    uses_old_logp = False
    uses_behavior_logp = True
    has_bound = True

    divergence: Divergence = Field("tv", description="measure of the distance between policy and sampler")
    threshold_low: float | None = Field(
        None, gt=0, description="largest fall of a token's probability where A < 0; none is 0.2 for tv and 0.05 for kl"
    )
    threshold_high: float | None = Field(
        None, gt=0, description="largest rise of a token's probability where A > 0; none is 0.2 for tv and 0.05 for kl"
    )
    cap: float = Field(20.0, gt=0, description="upper bound of a token's weight π_θ/μ")

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        behavior, advantage = view.column("behavior_logp"), view.column("advantage")
        usual = THRESHOLDS[self.divergence]
        low = usual if self.threshold_low is None else self.threshold_low
        high = usual if self.threshold_high is None else self.threshold_high
        drop = dppo_drops(view.logp, behavior, advantage, divergence=self.divergence, low=low, high=high)
        push = advantage.masked_fill(drop, 0.0) * capped_ratio(view.logp, behavior, self.cap)
        return reinforce(view.logp, push), Metrics({"clip_share": Mean.over(drop.count_nonzero(), len(drop))})


class IPO(PolicyLoss):
    """Importance policy optimization: −A·w without the tokens that moved further than ε, w = π_θ / μ.

    A token is dropped if |π_θ − μ| > ε, for either sign of A. The others keep the whole ratio w, without a cap.
    Sources: the default loss of prime-rl, with its ε of 0.3 (github.com/PrimeIntellect-ai/prime-rl, pull requests 3418
    and 3586; no paper). It is DPPO's trust region (2602.04879) on both sides. Assumes stale tokens: one that another
    update has moved far away is dropped, even where its advantage would bring it back. The ratio is against the
    sampler, so a correction of the mismatch must not weigh again.
    Ours: log w is cut to ±20. The source's penalty (log w)², whose coefficient is 0 by default, is left out.
    """

    is_tokenwise = True

    uses_old_logp = False
    uses_behavior_logp = True
    has_bound = True

    threshold: float = Field(
        0.3, gt=0, lt=1, description="largest |π_θ − μ| of a token that is trained on; larger drops fewer"
    )

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        behavior, advantage = view.column("behavior_logp"), view.column("advantage")
        drop = ipo_drops(view.logp, behavior, self.threshold)
        loss = masked_ratio(view.logp, behavior, advantage, drop)
        return loss, Metrics({"clip_share": Mean.over(drop.count_nonzero(), len(drop))})


class FlashReinforce(PolicyLoss):
    """FlashREINFORCE: −A·w on rollouts whose mean KL from the sampler is at most δ, w = π_θ / μ.

    The KL of a token is KL(μ ‖ π_θ) of the two-outcome distributions (this token, any other). A rollout whose mean over
    tokens is above δ is dropped whole, and still counts in the denominators. The mean is first over a rollout's tokens,
    then over rollouts (`seq-mean-token-mean`): a long failure has no more weight than a short one.
    Source: FlashREINFORCE (NVIDIA, September 2026; github.com/yifanzhang-pro/FlashREINFORCE, no arXiv number). Its
    experiments have δ from 1e-3 to 3e-3; the default is verl's. Assumes one update on each batch, and the advantage
    `batch_mean` over tasks with one rollout each. w corrects the choice made in a state; the states are the sampler's
    own, and δ bounds how far those are off. The ratio is against the sampler, so a correction of the mismatch must not
    weigh again.
    Ours: log w is cut to ±20, in the source to ±30. The gradient of −A·w is that of its −sg(w)·A·log π_θ.
    """

    is_sequence_level: ClassVar[bool] = True
    uses_old_logp = False
    uses_behavior_logp = True
    has_bound = True

    reduction: Reduction = Field("seq-mean-token-mean", description="reduction of the tokens' losses to one number")
    threshold: float = Field(
        1e-3, gt=0, description="δ: largest mean KL of a rollout that is trained on; larger drops fewer"
    )

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        behavior, advantage = view.column("behavior_logp"), view.column("advantage")
        drop = flash_drops(view.logp, behavior, view.units(self.unit), self.threshold)
        loss = masked_ratio(view.logp, behavior, advantage, drop)
        return loss, Metrics({"clip_share": Mean.over(drop.count_nonzero(), len(drop))})


class M2PO(PolicyLoss):
    """Second-moment trust: −A·w without the tokens that carry the second moment of log π_old/μ beyond a bound.

    Source: 2510.01161, with its bound of 0.04; w = π_θ / μ. Assumes that stale tokens are worth learning from without
    the few extreme ones. The largest (log π_old/μ)² are dropped, as few as bring the mean of the others down to the
    bound; nothing else is clipped. With π_old = μ, a sampler without lag, nothing is dropped.
    Ours: the moment is taken once, at the start of the step and over the whole rollout batch. Taken of π_θ, as in the
    paper, it would depend on the split into micro-batches.
    """

    uses_behavior_logp = True
    has_bound = True

    bound: float = Field(
        0.04, gt=0, description="upper bound of the mean of (log π_old/μ)² over the tokens that are kept"
    )

    def required_columns(self) -> frozenset[str]:
        return super().required_columns() | {"chosen"}

    def choose_tokens(self, view: View, *, seed: int, step: int) -> Tensor:  # noqa: ARG002
        drift = view.column("old_logp").double() - view.column("behavior_logp").double()
        return outliers(drift * drift, self.bound, view.ranks)

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        behavior, advantage = view.column("behavior_logp"), view.column("advantage")
        dropped = view.column("chosen", needed_by="M2PO")
        loss = masked_ratio(view.logp, behavior, advantage, dropped)
        return loss, Metrics({"chosen_share": Mean.over(dropped.count_nonzero(), len(dropped))})
