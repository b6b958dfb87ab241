"""Losses without a trust region: the score function itself, and the score function with a squared penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from etude.algorithms.base import PolicyLoss, log_ratio
from etude.algorithms.view import View
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def reinforce(logp: Tensor, advantage: Tensor) -> Tensor:
    """Return −A·log π_θ."""
    return -advantage * logp


def capped_ratio(logp: Tensor, behavior_logp: Tensor, cap: float) -> Tensor:
    """Return sg(min(w, C)), w = π_θ / μ."""
    return log_ratio(logp.detach(), behavior_logp).exp().clamp(max=cap)


def dro(logp: Tensor, old_logp: Tensor, advantage: Tensor, *, beta: float) -> Tensor:
    """Return −(A·log π_θ − ½β·(log r)²)."""
    return 0.5 * beta * (logp - old_logp) ** 2 - advantage * logp


class REINFORCE(PolicyLoss):
    """The score function: −A·log π_θ; with a cap C, −sg(min(w, C))·A·log π_θ, w = π_θ / μ.

    Source: Williams (1992); the truncated weight is V-trace's (1802.01561). Exact on-policy: with A = R − b and
    `seq-mean-token-sum` its gradient is −∇J in expectation. Without a cap it assumes that the tokens are π_θ's own.
    `cap` is for two policies, with no π_old between sampler and trainer. Its weight covers the whole ratio from μ to
    π_θ, so a correction of the mismatch must not weigh again.
    """

    is_tokenwise = True

    uses_old_logp = False

    cap: float | None = Field(None, gt=0, description="upper bound of a token's weight π_θ/μ; none applies no weight")

    def required_columns(self) -> frozenset[str]:
        return super().required_columns() | ({"behavior_logp"} if self.cap is not None else set())

    def bounds_ratio(self) -> bool:
        return self.cap is not None

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        loss = reinforce(view.logp, view.column("advantage"))
        if self.cap is None:
            return loss, Metrics()
        weight = capped_ratio(view.logp, view.column("behavior_logp"), self.cap)
        return loss * weight, Metrics(
            {
                "ratio": Mean.over(weight.sum(), len(weight)),
                "clip_share": Mean.over((weight == self.cap).count_nonzero(), len(weight)),
            }
        )


class GPGLoss(PolicyLoss):
    """Group policy gradient: −A·log π_θ, for the advantage of the same name.

    Source: 2504.02546. Assumes on-policy tokens: there is no ratio and no clip. The specific parts of GPG, the factor
    for groups that taught nothing and the free choice of normalizer, are in the advantage `gpg`.
    """

    is_tokenwise = True

    uses_old_logp = False

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        return reinforce(view.logp, view.column("advantage")), Metrics()


class DRO(PolicyLoss):
    """Direct reward optimization, policy part: −(A·log π_θ − ½β·(log r)²), r = π_θ / π_old.

    Source: 2405.19107. The gradient is that of its least-squares objective, with the value taken as known. Away from
    π_old each token is pulled back in proportion to log r; the equilibrium is log r = A/β. It assumes no ratio weights.
    Ours: token by token rather than over the sequence; held to π_old rather than to a fixed reference; the default β is
    our choice. log r is squared and never exponentiated, so it is not clamped: a clamp would remove the gradient where
    a token is furthest from π_old.
    """

    has_bound = True

    beta: float = Field(1.0, gt=0, description="strength with which a token is pulled back to π_old")

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        old, advantage = view.column("old_logp"), view.column("advantage")
        pull = (view.logp.detach() - old).abs()
        loss = dro(view.logp, old, advantage, beta=self.beta)
        return loss, Metrics({"drift": Mean.over(pull.sum(), len(pull))})
