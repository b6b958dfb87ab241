"""Losses with a sequence's ratio: one number for all action tokens of a rollout, or of a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from etude.algorithms.base import CLAMP, PolicyLoss, log_ratio
from etude.algorithms.losses.clip import surrogate
from etude.algorithms.reduce import Reduction
from etude.algorithms.segments import Segments
from etude.algorithms.view import View, flatnonzero
from etude.errors import BatchError, ConfigError
from etude.lazy import torch
from etude.observe import Max, Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def gspo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, units: Segments, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return the surrogate of sg(s)·π_θ/sg(π_θ), s = exp(mean log r) over the unit, and a mask of the clipped tokens.

    The ratio's value is the sequence's and its gradient the token's own. s itself is not differentiated: that would
    count the gradient twice.
    """
    own = logp.detach()
    s = units.broadcast(units.mean(log_ratio(own, old_logp)).exp())
    ratio = torch.addcmul(s, s, logp - own)  # π_θ/sg(π_θ) is 1 with log π_θ's gradient, as is 1 + its log
    return surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high)


def gmpo(logp: Tensor, old_logp: Tensor, advantage: Tensor, units: Segments, *, clip: float) -> tuple[Tensor, Tensor]:
    """Return −A·exp(mean of log r, clipped in the direction of A), the unit's one value at each of its tokens."""
    outward = advantage.sign() * (logp - old_logp)
    each = units.last(advantage)
    value = -each * (each.sign() * units.mean(outward.clamp(-CLAMP, clip))).exp()
    return units.broadcast(value), outward.detach() > clip


def vespo(
    logp: Tensor,
    behavior_logp: Tensor,
    advantage: Tensor,
    units: Segments,
    *,
    power_positive: float,
    decay_positive: float,
    power_negative: float,
    decay_negative: float,
) -> tuple[Tensor, Tensor]:
    """Return −sg(φ(W))·A·log π_θ, φ(W) = W^k·e^{λ(1 − W)}, W = ∏ π_θ/μ over the unit; and φ at each token."""
    log_w = units.sum(logp.detach() - behavior_logp).clamp(-CLAMP, CLAMP)
    room = 1 - log_w.exp()
    up = units.broadcast((power_positive * log_w + decay_positive * room).exp())
    down = units.broadcast((power_negative * log_w + decay_negative * room).exp())
    weight = torch.where(advantage > 0, up, down)
    return -advantage * weight * logp, weight


class GSPO(PolicyLoss):
    """Group sequence policy optimization: PPO's surrogate with s = exp(mean log r) over the unit as the ratio.

    Source: 2507.18071, in its token form sg(s)·π_θ/sg(π_θ): at equal advantages its value and gradient are the sequence
    form's, and advantages may still differ from token to token.
    Assumes that a reward of a sequence needs a ratio of the sequence. The mean over tokens keeps s near 1, so the clip
    is of the order 1e-4: PPO's 0.2 would never act. Reduced by `seq-mean-token-mean`. With sums over tokens instead,
    longer rollouts weigh more, which is nearly LUSPO (2602.05261).
    """

    has_bound = True
    is_sequence_level: ClassVar[bool] = True

    reduction: Reduction = Field("seq-mean-token-mean", description="reduction of the tokens' losses to one number")
    clip_low: float = Field(
        3e-4,
        gt=0,
        lt=1,
        description="for A < 0, the gradient stops at unit ratios below 1 minus this; larger clips less",
    )
    clip_high: float = Field(
        4e-4, gt=0, description="for A > 0, the gradient stops at unit ratios above 1 plus this; larger clips less"
    )

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        old, advantage = view.column("old_logp"), view.column("advantage")
        loss, cut = gspo(
            view.logp, old, advantage, view.units(self.unit), clip_low=self.clip_low, clip_high=self.clip_high
        )
        return loss, Metrics({"clip_share": Mean.over(cut.count_nonzero(), len(cut))})


class GMPO(PolicyLoss):
    """Geometric-mean policy optimization: −A·exp(mean of clipped log r), one value for each unit, then their mean.

    Source: 2507.20673, with its clip of e^{±0.4}: log r is bounded from above where A > 0 and from below where A < 0.
    Assumes one advantage for the whole unit; several are refused, because the geometric mean of ratios then has no
    meaning.
    Ours: a token that a correction rejected enters the mean as log r = 0, so it gets no gradient. The unit's value
    counts by the share of its tokens that were kept. Weights are one number for each rollout.
    """

    has_bound = True
    is_sequence_level: ClassVar[bool] = True
    weight_levels: ClassVar[frozenset[str]] = frozenset({"sequence", "geometric"})

    reduction: Reduction = Field(
        "seq-mean-token-mean", description="reduction to one loss; only the mean over units is allowed"
    )
    clip: float = Field(
        0.4, gt=0, lt=CLAMP, description="largest |log r| in the direction that the advantage points to"
    )

    @model_validator(mode="after")
    def _reduction_is_a_mean_of_values(self) -> GMPO:
        if self.reduction != "seq-mean-token-mean":
            raise ConfigError(
                f"`reduction={self.reduction}` sums over tokens, but GMPO has one value for a whole rollout. Leave it "
                f"at `seq-mean-token-mean`, the mean of those values, or choose a token-level loss such as `ppo`."
            )
        return self

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        old = view.column("old_logp")
        advantage = view.column("advantage")
        units = view.units(self.unit)
        self._refuse_several_advantages(advantage, units, view)
        logp = view.logp if view.batch.keep is None else torch.where(view.column("keep"), view.logp, old)
        loss, cut = gmpo(logp, old, advantage, units, clip=self.clip)
        return loss, Metrics({"clip_share": Mean.over(cut.count_nonzero(), len(cut))})

    def _refuse_several_advantages(self, advantage: Tensor, units: Segments, view: View) -> None:
        after = flatnonzero(advantage[1:] != advantage[:-1]) + 1
        inside = after[~torch.isin(after, units.offsets)]
        if len(inside):
            at = int(inside[0])
            rollout = int(torch.searchsorted(view.rollouts.offsets, at, right=True)) - 1
            raise BatchError(
                f"Rollout {view.batch.get_rollout_id(rollout)} has the advantages {float(advantage[at - 1]):g} and "
                f"{float(advantage[at]):g} within one {self.unit}, but GMPO takes one for all of it. Choose an "
                f"estimator of whole rollouts, such as `grpo`, or a token-level loss, such as `ppo`."
            )


class VESPO(PolicyLoss):
    """Variational sequence-level soft policy optimization: −sg(φ(W))·A·log π_θ, φ(W) = W^k·e^{λ(1 − W)}.

    Source: 2602.10693; (k, λ) = (2, 3) for A > 0 and (3, 2) for A < 0 are those of the authors' code. W = ∏ π_θ/μ is
    the whole sequence's weight, not normalized by length. φ(1) = 1, and φ goes to 0 as W vanishes or explodes.
    Assumes that the variance of W must be bounded. The ratio is against the sampler, so a correction of the mismatch
    must not weigh again.
    Ours: k and λ depend on the sign of each token's advantage; log W is cut to ±20.
    """

    is_sequence_level: ClassVar[bool] = True
    uses_old_logp = False
    uses_behavior_logp = True
    has_bound = True

    power_positive: float = Field(2.0, ge=0, description="k for A > 0: larger makes unlikely rollouts fade out faster")
    decay_positive: float = Field(
        3.0, ge=0, description="λ for A > 0: larger makes overweight rollouts fade out faster"
    )
    power_negative: float = Field(3.0, ge=0, description="k for A < 0: larger makes unlikely rollouts fade out faster")
    decay_negative: float = Field(
        2.0, ge=0, description="λ for A < 0: larger makes overweight rollouts fade out faster"
    )

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        behavior, advantage = view.column("behavior_logp"), view.column("advantage")
        loss, weight = vespo(
            view.logp,
            behavior,
            advantage,
            view.units(self.unit),
            power_positive=self.power_positive,
            decay_positive=self.decay_positive,
            power_negative=self.power_negative,
            decay_negative=self.decay_negative,
        )
        metrics = Metrics({"soft_weight": Mean.over(weight.sum(), len(weight))})
        if len(weight):
            metrics.add("soft_weight_max", Max.of(weight.max()))
        return loss, metrics
