"""Losses that keep the policy near π_old by bounding a token's ratio: sharply, in the weight only, or softly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from etude.algorithms.base import PolicyLoss, log_ratio
from etude.algorithms.view import View
from etude.errors import ConfigError
from etude.lazy import torch
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def surrogate(ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return max(−A·r, −A·clip(r)), and a mask of the tokens whose gradient the clip removed."""
    push = -advantage
    plain = push * ratio
    with torch.no_grad():  # where the clipped term is larger, the ratio is out of bounds: no gradient
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high).mul_(push)
        cut = clipped > plain
    return torch.where(cut, clipped, plain), cut


def ppo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the surrogate, for A < 0 at most −A·c, and a mask of the tokens whose gradient either clip removed."""
    ratio = log_ratio(logp, old_logp).exp()
    loss, cut = surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        ceiling = -advantage * dual_clip
        over = (advantage < 0) & (loss > ceiling)
        loss, cut = torch.where(over, ceiling, loss), cut | over
    return loss, cut


def cispo(logp: Tensor, old_logp: Tensor, advantage: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return −sg(clip(r, low, high))·A·log π_θ, and a mask of the tokens whose weight was clipped."""
    ratio = log_ratio(logp.detach(), old_logp).exp()
    weight = ratio.clamp(low, high)
    return -advantage * weight * logp, weight != ratio


def sapo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, *, tau_positive: float, tau_negative: float
) -> tuple[Tensor, Tensor]:
    """Return −A·(4/τ)·σ(τ(r − 1)), and σ."""
    ratio = log_ratio(logp, old_logp).exp()
    tau = torch.where(advantage > 0, ratio.new_tensor(tau_positive), ratio.new_tensor(tau_negative))
    soft = torch.sigmoid(tau * (ratio - 1))
    return (-4 * advantage / tau) * soft, soft.detach()


class ClippedLoss(PolicyLoss):
    """A loss with PPO's clip of a ratio."""

    has_bound = True

    clip_low: float = Field(
        0.2, gt=0, lt=1, description="for A < 0, the gradient stops at ratios below 1 minus this; larger clips less"
    )
    clip_high: float = Field(
        0.2, gt=0, description="for A > 0, the gradient stops at ratios above 1 plus this; larger clips less"
    )


class PPO(ClippedLoss):
    """The clipped surrogate: max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high)), r = π_θ / π_old.

    Sources: 1707.06347; dual clip 1912.09729; DAPO's wider upper bound (0.28) 2503.14476.
    Assumes that A is constant in θ. The maximum is pessimistic. A token that left the trust region in the direction of
    its advantage has no gradient. One that left it the other way keeps its full gradient.
    """

    is_tokenwise = True

    dual_clip: float | None = Field(
        None, gt=1, description="for A < 0, the ratio beyond which a token stops counting; none leaves it unbounded"
    )

    @model_validator(mode="after")
    def _dual_clip_is_beyond_the_clip(self) -> PPO:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ConfigError(
                f"`dual_clip` is {self.dual_clip}, within the ordinary clip of 1 + clip_high = {1 + self.clip_high:g}. "
                f"Raise it (3 is usual), or leave it out."
            )
        return self

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        old, advantage = view.column("old_logp"), view.column("advantage")
        loss, cut = ppo(
            view.logp,
            old,
            advantage,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        return loss, Metrics({"clip_share": Mean.over(cut.count_nonzero(), len(cut))})


class CISPO(PolicyLoss):
    """Clip the weight, never the gradient: −sg(clip(r, low, high))·A·log π_θ, r = π_θ / π_old.

    Source: 2506.13585. Assumes that rare tokens far from π_old matter: PPO's clip removes their gradient, this one only
    bounds their weight, so every token keeps a gradient.
    Ours: the bounds are absolute ratios, [0, 5]; the paper writes 1 − ε and 1 + ε, and leaves the lower one open.
    """

    is_tokenwise = True

    has_bound = True

    low: float = Field(0.0, ge=0, description="lower bound of the weight of a token's gradient")
    high: float = Field(5.0, gt=0, description="upper bound of the weight of a token's gradient")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> CISPO:
        if self.low >= self.high:
            raise ConfigError(
                f"`low` is {self.low:g} and `high` is {self.high:g}: they bound the ratio from below and above, as "
                f"ratios and not as distances from 1. Set low < high (0 and 5 are usual)."
            )
        return self

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        old, advantage = view.column("old_logp"), view.column("advantage")
        loss, cut = cispo(view.logp, old, advantage, low=self.low, high=self.high)
        return loss, Metrics({"clip_share": Mean.over(cut.count_nonzero(), len(cut))})


class SAPO(PolicyLoss):
    """A soft gate in the place of a clip: −A·(4/τ)·σ(τ(r − 1)), r = π_θ / π_old, τ by the sign of A.

    Source: 2511.20347. The factor 4/τ makes the gradient that of REINFORCE at r = 1. Away from 1 the gradient falls off
    like a bell curve in r, faster for larger τ. The larger τ for A < 0 assumes that lowering a token, which raises all
    others, is the noisier half. A token with A = 0 has no loss, so its τ does not matter.
    """

    is_tokenwise = True

    has_bound = True

    tau_positive: float = Field(1.0, gt=0, description="rate at which the gradient fades as r leaves 1, where A > 0")
    tau_negative: float = Field(1.05, gt=0, description="rate at which the gradient fades as r leaves 1, where A < 0")

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        old, advantage = view.column("old_logp"), view.column("advantage")
        loss, soft = sapo(view.logp, old, advantage, tau_positive=self.tau_positive, tau_negative=self.tau_negative)
        gates = 4 * (soft.sum() - soft.dot(soft))  # each token's gate is 4σ(1 − σ): 1 where r = 1
        return loss, Metrics({"gate": Mean.over(gates, len(soft))})
