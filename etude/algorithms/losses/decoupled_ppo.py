"""Decoupled PPO: one policy bounds the update, another sampled the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from etude.algorithms.base import log_ratio
from etude.algorithms.losses.clip import ClippedLoss, surrogate
from etude.algorithms.view import View
from etude.lazy import torch
from etude.observe import Max, Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def log_linear(
    logp: Tensor, behavior_logp: Tensor, *, prox_version: Tensor, behavior_version: Tensor, version: Tensor
) -> Tensor:
    """Return log π_prox = sg[log μ + α(log π_θ − log μ)], α = (v_prox − v_μ)/(v_θ − v_μ); α = 1 where v_θ = v_μ."""
    sampled = behavior_version.to(logp.dtype)  # integers would be divided in float32
    behind = version - sampled
    alpha = torch.where(behind == 0, 1.0, (prox_version - sampled) / behind)
    return torch.lerp(behavior_logp, logp.detach(), alpha)


def decoupled_ppo(
    logp: Tensor, prox_logp: Tensor, behavior_logp: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return π_prox/μ times the surrogate of π_θ/π_prox, a mask of the tokens that the clip cut, and the weights."""
    ratio = log_ratio(logp, prox_logp).exp()
    weight = log_ratio(prox_logp, behavior_logp).exp()
    loss, cut = surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    return weight * loss, cut, weight


class DecoupledPPO(ClippedLoss):
    """PPO around a proximal policy, weighted from the sampler: (π_prox/μ)·max(−A r, −A clip(r)), r = π_θ/π_prox.

    Sources: 2110.00641; for language models 2505.24298; the log-linear proximal policy 2512.06547.
    Assumes tokens of several versions: the trust region should be around a recent policy, not around the sampler's.
    `prox=recomputed` takes π_prox = π_old, at the price of a forward pass before the update. `prox=log_linear` saves
    this pass: it interpolates log π_prox between log μ and log π_θ, in proportion to the policy versions. v_μ is the
    batch's `version`; v_prox, the trainer's at the start of the step, is the column `trainer_version`; v_θ = v_prox + 1
    is the version that this step creates. So a token sampled by the trainer's own version has π_prox = μ, as it should.
    Ours: the token weight π_prox/μ has no cap beyond e^20. It replaces a correction's weight.
    """

    is_tokenwise = True

    uses_old_logp = False
    uses_behavior_logp = True

    prox: Literal["recomputed", "log_linear"] = Field(
        "recomputed", description="source of the proximal policy's log-probs: a forward pass, or interpolation"
    )

    def required_columns(self) -> frozenset[str]:
        columns = {"old_logp"} if self.prox == "recomputed" else {"version", "trainer_version"}
        return super().required_columns() | columns

    def prox_logp(self, view: View) -> Tensor:
        """[A]: log π_prox, without gradient."""
        if self.prox == "recomputed":
            return view.column("old_logp")
        trainer = view.batch.require("trainer_version", needed_by="`prox=log_linear`").to(view.logp.dtype)
        trainer = view.rollouts.broadcast(trainer)
        return log_linear(
            view.logp,
            view.column("behavior_logp"),
            prox_version=trainer,
            behavior_version=view.column("version"),
            version=trainer + 1,
        )

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        behavior, advantage = view.column("behavior_logp"), view.column("advantage")
        loss, cut, weight = decoupled_ppo(
            view.logp,
            self.prox_logp(view),
            behavior,
            advantage,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        metrics = Metrics(
            {
                "clip_share": Mean.over(cut.count_nonzero(), len(cut)),
                "prox_weight": Mean.over(weight.sum(), len(weight)),
            }
        )
        if len(weight):
            metrics.add("prox_weight_max", Max.of(weight.max()))
        return loss, metrics
