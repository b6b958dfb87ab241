"""Corrections of the mismatch between the sampler's policy (μ) and the trainer's at the start of a step (π_old).

ρ_t = π_old/μ at an action token. A correction weights the policy loss by ρ, leaves tokens or rollouts out of it, or
both; KL and entropy terms do not change. Everything here is known before the update and carries no gradient, except
OPSM: it reads π_θ and is computed again in each micro-batch, within each rollout.

Published corrections in these options:

    tis (token)           weight=truncate                                   min(ρ_t, 2)
    tis (sequence)        weight=truncate level=sequence                    min(∏ρ, 5)
    mis, icepop           weight=mask                                       ρ_t·1[0.5 ≤ ρ_t ≤ 5]     2510.18855
    seq-mis               weight=mask level=sequence low=0 high=2           ∏ρ·1[∏ρ ≤ 2]
    geometric mask        reject=[{over:seq_mean,low:0.99,high:1.01}]       drop the rollout
    veto                  reject=[{over:seq_max,low:1e-4}]                  drop the rollout if any ρ_t < 1e-4
    token rejection       reject=[{low:0.5,high:2}]                         drop the token, no weight
    k3 rejection          reject=[{statistic:k3,over:seq_mean,high:0.01}]   drop the rollout
    bypass                policies=two                                      π_old := μ, no pass to compute it
    opsm                  opsm_delta=δ                                   2512.02556
    vcpo's step           step_scaling=sqrt_ess                             η·√(ESS/N)               2602.17616
    score centering       center=true                                       ℓ(a) − E_μ[w(v) ℓ(v)]    2609.20807

Rules combine: a token is kept if every rule keeps it. "Sequence" is the rollout: all its action tokens, each once.
A weight's log-ratio is cut to ±20: a token's own, or a rollout's after the sum or mean of its uncut tokens.
Rules compare uncut ratios, since nothing is multiplied by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from etude.algorithms.base import CLAMP
from etude.algorithms.segments import Segments
from etude.algorithms.view import Ranks, Unit, View
from etude.config import Config
from etude.errors import ConfigError
from etude.lazy import torch
from etude.observe import Max, Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor

ImportanceLevel = Literal["token", "sequence", "geometric"]
"""The level of a ratio: a token; a rollout, as the product over its tokens; or its geometric mean over them."""

CEILING: dict[ImportanceLevel, float] = {"token": 2.0, "sequence": 5.0, "geometric": 2.0}
"""The default upper bound of a weight. The geometric mean has the size of a token's ratio; its default is ours."""
MASK_BOUNDS = (0.5, 5.0)
"""IcePop's bounds."""


@dataclass(frozen=True)
class CorrectionResult:
    """The result of a correction for each action token."""

    weight: Tensor | None = None  # [A]
    """Multiplies the policy loss; None means no weights."""
    keep: Tensor | None = None  # [A] bool
    """False where the policy loss leaves a token out; None keeps all."""
    metrics: Metrics = field(default_factory=Metrics)


# -- the formulas -----------------------------------------------------------------------------------------------------


def importance_weight(log_rho: Tensor, rollouts: Segments, level: ImportanceLevel) -> Tensor:
    """[A] → [A]: ρ at each token, of the token itself or of its rollout."""
    if level == "token":
        return log_rho.clamp(-CLAMP, CLAMP).exp()
    whole = rollouts.sum(log_rho) if level == "sequence" else rollouts.mean(log_rho)
    return rollouts.broadcast(whole.clamp(-CLAMP, CLAMP).exp())


def rescale_to_mean_one(
    weight: Tensor, rollouts: Segments, over: Literal["tokens", "rollouts"], ranks: Ranks
) -> Tensor:
    """[A] → [A]: rescale so that the mean over the rollout batch is 1; weights that are all 0 stay 0.

    Over rollouts it is the mean of the rollouts' means; a rollout without an action token does not count.
    """
    if over == "tokens":
        total, count = weight.sum(dtype=torch.float64), len(weight)
    else:
        total, count = rollouts.mean(weight).sum(dtype=torch.float64), int((rollouts.lengths > 0).sum())
    total, counted = ranks.all_reduce(torch.stack([total, torch.full_like(total, count)]))
    return weight * torch.where(total > 0, counted / total, 1.0).to(weight.dtype)


def acceptance_mask(
    log_rho: Tensor,
    rollouts: Segments,
    *,
    statistic: Literal["k1", "k2", "k3"],
    over: Literal["token", "seq_sum", "seq_mean", "seq_max"],
    low: float,
    high: float,
) -> Tensor:
    """[A] → [A] bool: true where the statistic of the token, or of its rollout, is between low and high.

    `seq_max` keeps a rollout if all its tokens are within the bounds, which is so exactly if the worst one is.
    """
    value = log_rho
    if statistic == "k2":
        value = 0.5 * log_rho.square()
    elif statistic == "k3":
        value = torch.expm1(log_rho) - log_rho
    if over == "seq_sum":
        value = rollouts.sum(value)
    elif over == "seq_mean":
        value = rollouts.mean(value)
    if statistic == "k1":
        value = value.exp()
    within = (value >= low) & (value <= high)
    if over == "seq_max":
        within = rollouts.sum((~within).to(log_rho.dtype)) == 0
    return within if over == "token" else rollouts.broadcast(within)


def rollout_weights(log_rho: Tensor, rollouts: Segments) -> Tensor:
    """[A] → [N] float64: ∏ρ of each rollout that acted."""
    return rollouts.sum(log_rho)[rollouts.lengths > 0].double().clamp(-CLAMP, CLAMP).exp()


def weight_moments(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count of the weights, their sum, and the sum of their squares, as float64 scalars."""
    return torch.full_like(weight.sum(), len(weight)), weight.sum(), weight.square().sum()


def effective_share(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """Return the effective sample size (Σw)²/Σw² as a share of the count: 1 if all weights are equal."""
    return total.square() / (count * squares).clamp(min=torch.finfo(squares.dtype).tiny)


def opsm_mask(view: View, delta: float, unit: Unit) -> Tensor:
    """[A] bool: off-policy sequence masking, false for the tokens of units with A < 0 and mean log(μ/π_θ) > delta.

    Source: 2512.02556. A unit's advantage is the mean over its tokens. If the estimator gives one number a rollout,
    this mean is the advantage itself. We found no threshold in the paper, so there is no default. It reads π_θ of one
    unit at a time, so it does not depend on the micro-batch.
    """
    units = view.units(unit)
    drift = units.mean(view.column("behavior_logp", needed_by="OPSM") - view.logp.detach())
    dropped = (units.mean(view.column("advantage", needed_by="OPSM")) < 0) & (drift > delta)
    return units.broadcast(~dropped)


# -- the metrics ------------------------------------------------------------------------------------------------------


def measure_mismatch(view: View) -> Metrics:
    """Measure the distance D = KL(μ ‖ π_old) at the action tokens.

    k1 = mean of −log ρ and k3 = mean of ρ − 1 − log ρ both estimate D; chi2 = mean of ρ² − 1. The effective sample size
    is (Σρ)²/(n Σρ²), a share of the n tokens. `rollout_effective_sample_size` is that of ∏ρ over the rollouts that
    acted. The correlation is Pearson's, of the probabilities. Ratios are cut to e^{±20}. Perplexity, sample sizes and
    correlation are of the whole rollout batch, by two reductions over the ranks.
    """
    behavior, old = view.column("behavior_logp").detach(), view.column("old_logp").detach()
    log_rho, n = (old - behavior).clamp(-CLAMP, CLAMP), len(old)
    rho = log_rho.exp()
    p = behavior.exp()
    q = old.exp()
    whole = rollout_weights(old - behavior, view.rollouts)  # ∏ρ
    squares = _total(rho * rho)
    counted = torch.full_like(squares, n)
    sums = view.ranks.all_reduce(
        torch.stack(
            [counted, _total(p), _total(q), _total(behavior), _total(old), _total(rho), squares, *weight_moments(whole)]
        )
    )
    mean_p, mean_q, mean_behavior, mean_old = (sums[1:5] / sums[0].clamp(min=1)).unbind()
    off_p, off_q = p - mean_p.to(p.dtype), q - mean_q.to(q.dtype)
    spread = view.ranks.all_reduce(torch.stack([_total(off_p * off_q), _total(off_p.square()), _total(off_q.square())]))
    varies = (spread[1] > 0) & (spread[2] > 0)
    r = torch.where(varies, spread[0] / torch.where(varies, spread[1] * spread[2], 1.0).sqrt(), 0.0)
    metrics = Metrics(
        {
            "mismatch/k1": Mean.over(-_total(log_rho), n),
            "mismatch/k3": Mean.over(_total(torch.expm1(log_rho) - log_rho), n),
            "mismatch/chi2": Mean.over(squares - n, n),
            "mismatch/sampler_perplexity": Mean.of((-mean_behavior).exp(), n),
            "mismatch/trainer_perplexity": Mean.of((-mean_old).exp(), n),
            "mismatch/effective_sample_size": Mean.of(effective_share(sums[0], *sums[5:7]), n),
            "mismatch/rollout_effective_sample_size": Mean.of(effective_share(*sums[7:]), len(whole)),
            "mismatch/correlation": Mean.of(r, n * varies),
        }
    )
    if n:
        metrics.add("mismatch/largest_gap", Max.of((p - q).abs().max()))
    return metrics


def _total(values: Tensor) -> Tensor:
    return values.sum().double()


# -- the options ------------------------------------------------------------------------------------------------------


class RejectionRule(Config):
    """One rule that leaves tokens or rollouts out: a statistic of ρ, its level, and its bounds.

    k1: ρ_t, ∏ρ over the rollout, its geometric mean, or each ρ_t of it. It is bounded on both sides. The bounds are on
    π_old/μ itself: low = 0.5 leaves out tokens that the trainer finds less than half as likely as the sampler did.
    k2: ½ log²ρ. k3: ρ − 1 − log ρ. Both are 0 where the two agree and are bounded above.
    """

    statistic: Literal["k1", "k2", "k3"] = Field(
        "k1", description="statistic that is compared: k1 is ρ, k2 is ½ log²ρ, k3 is ρ − 1 − log ρ"
    )
    over: Literal["token", "seq_sum", "seq_mean", "seq_max"] = Field(
        "token", description="level of the rule: each token, or its rollout by sum (product for k1), mean or maximum"
    )
    low: float | None = Field(None, gt=0, description="smallest ρ that is kept; none keeps all")
    high: float | None = Field(None, gt=0, description="largest statistic that is kept; none keeps all")

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> RejectionRule:
        if self.low is None and self.high is None:
            raise ConfigError("A rejection rule without a bound rejects nothing: set `low`, `high`, or both.")
        if self.low is not None and self.statistic != "k1":
            raise ConfigError(
                f"`low` = {self.low:g} would reject where trainer and sampler agree best: {self.statistic} is 0 there. "
                f"Set `high` instead, or `statistic=k1`, whose bounds are on ρ."
            )
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError(f"`low` = {self.low:g} must be below `high` = {self.high:g}, or everything is rejected.")
        return self

    def acceptance_mask(self, log_rho: Tensor, rollouts: Segments) -> Tensor:
        """[A] bool: true where this rule keeps a token."""
        low, high = 0.0 if self.low is None else self.low, torch.inf if self.high is None else self.high
        return acceptance_mask(log_rho, rollouts, statistic=self.statistic, over=self.over, low=low, high=high)

    def accepts_token(self, log_rho: Tensor) -> Tensor:
        """[…] → […] bool: true where this rule of single tokens keeps one."""
        alone = Segments(torch.ones(log_rho.numel(), dtype=torch.int64, device=log_rho.device))
        return self.acceptance_mask(log_rho.reshape(-1), alone).view(log_rho.shape)


class CorrectionConfig(Config):
    """The use of ρ = π_old/μ: weights, rejection, and the number of policies (three or two).

    truncate: min(ρ, high), high = 2 for tokens, 5 for sequences. mask: ρ·1[low ≤ ρ ≤ high], [0.5, 5].
    The weight is detached and multiplies the loss after PPO's maximum. Rejected tokens contribute 0 and still count in
    every denominator.
    Sources: 2510.18855 for the mask and its lower and upper bound; the others are the published recipes tabled above.
    Assumes that μ and π_old have the same temperature and the same vocabulary.
    center removes the drift that another sampler causes where advantages of a state have a mean: behind luck, other
    players, or a good beginning. It needs the sampler's likeliest tokens at each place; the others count as one.
    step_scaling suits AdamW, whose steps do not shrink with the gradient. Source: 2602.17616. Ours: ρ is of the step's
    start, also for later updates of a step.
    """

    policies: Literal["three", "two"] = Field(
        "three", description="three: μ, π_old and π_θ; two: μ replaces π_old, which saves a forward pass"
    )
    weight: Literal["none", "truncate", "mask"] = Field(
        "none", description="weight ρ on the loss: none; truncate: cut at `high`; mask: 0 outside the bounds"
    )
    level: ImportanceLevel = Field(
        "token", description="level of the weight's ρ: a token, or a rollout by product or geometric mean"
    )
    low: float | None = Field(None, ge=0, description="smallest ρ that `mask` keeps; none is 0.5")
    high: float | None = Field(None, gt=0, description="largest weight; none is 2, or 5 for sequences and for `mask`")
    normalize: Literal["none", "tokens", "rollouts"] = Field(
        "none", description="rescale the weights to mean 1 over the rollout batch's tokens, or over its rollouts"
    )
    reject: tuple[RejectionRule, ...] = Field(
        (), description="rules that leave tokens or rollouts out of the policy loss"
    )
    opsm_delta: float | None = Field(
        None, ge=0, description="drop a rollout with A < 0 once its mean log(μ/π_θ) exceeds this (OPSM); none is off"
    )

    center: bool = Field(
        False, description="subtract from a token's loss what the sampler would have had on average (score centering)"
    )
    alternatives: int = Field(
        32, ge=1, description="tokens of each place that the sampler records for `center`; more leave less drift"
    )

    step_scaling: Literal["none", "sqrt_ess"] = Field(
        "none",
        description="factor of the learning rate: none, or the root of the effective sample size of the update's "
        "rollouts (VCPO)",
    )

    @model_validator(mode="after")
    def _check_weight_options(self) -> CorrectionConfig:
        if self.policies == "two" and (self.weight != "none" or self.reject or self.step_scaling != "none"):
            option = f"weight={self.weight}" if self.weight != "none" else "reject"
            option = option if self.weight != "none" or self.reject else f"step_scaling={self.step_scaling}"
            raise ConfigError(
                "With `correction.policies=two` the sampler's log-probs stand in for π_old, so ρ is 1 everywhere and "
                f"`correction.{option}` would do nothing. Set `correction.policies=three`, or leave that out."
            )
        if self.weight == "none":
            for name, idle in (("level", "token"), ("low", None), ("high", None), ("normalize", "none")):
                if (value := self.__dict__[name]) != idle:
                    raise ConfigError(
                        f"`correction.{name}={value}` shapes a weight, and `correction.weight` is `none`. Set "
                        f"`correction.weight=truncate` or `correction.weight=mask`, or leave `correction.{name}` out."
                    )
        if self.weight == "truncate" and self.low is not None:
            raise ConfigError(
                f"`correction.weight=truncate` cuts large weights only, so `correction.low={self.low:g}` would do "
                "nothing. Set `correction.weight=mask` to leave small ones out, or leave `correction.low` out."
            )
        low, high = self.bounds
        if low >= high:
            raise ConfigError(
                f"`correction.low={low:g}` must be below `correction.high={high:g}`, or no weight is left."
            )
        return self

    @model_validator(mode="after")
    def _check_centering(self) -> CorrectionConfig:
        whole_rollouts = {
            f"level={self.level}": self.level != "token",
            f"normalize={self.normalize}": self.normalize != "none",
            "reject": any(rule.over != "token" for rule in self.reject),
            "opsm_delta": self.opsm_delta is not None,
        }
        for option in (option for option, on in whole_rollouts.items() if self.center and on):
            raise ConfigError(
                f"`correction.center=true` weighs tokens, and `correction.{option}` rollouts. Leave one of them out."
            )
        return self

    @property
    def recorded_alternatives(self) -> int:
        """The number of alternatives to each token that the sampler has to record."""
        return self.alternatives if self.center else 0

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest ρ that a weight keeps unchanged."""
        low, high = MASK_BOUNDS if self.weight == "mask" else (0.0, CEILING[self.level])
        return low if self.low is None else self.low, high if self.high is None else self.high

    def required_columns(self) -> frozenset[str]:
        """Return the batch columns that it reads."""
        uses_rho = self.weight != "none" or self.reject or self.step_scaling != "none"
        needs = {"behavior_logp", "old_logp"} if uses_rho else set()
        needs |= {"behavior_logp"} if self.policies == "two" or self.opsm_delta is not None else set()
        needs |= {"behavior_logp", "alternative_ids", "alternative_logp"} if self.center else set()
        if self.center and self.policies == "three":
            needs |= {"old_alternative_logp"}
        return frozenset(needs)

    def __call__(self, view: View) -> CorrectionResult:
        """Compute weights and rejections, once a step, over the rollout batch.

        The mismatch is measured if π_old is known by now. Where μ replaces it, the trainer's log-probs are not known.
        """
        known = view.batch.behavior_logp is not None and view.batch.old_logp is not None
        metrics = measure_mismatch(view) if known and self.policies == "three" else Metrics()
        if self.weight == "none" and not self.reject:
            return CorrectionResult(metrics=metrics)
        log_rho = view.column("old_logp", needed_by="The correction") - view.column(
            "behavior_logp", needed_by="The correction"
        )
        log_rho = log_rho.detach()
        weight = None if self.weight == "none" else self._compute_weight(log_rho, view, metrics)
        keep = self._compute_keep_mask(log_rho, view, metrics) if self.reject else None
        if self.center and keep is not None:  # a rejected token still has what the others are expected to have
            weight = keep.to(log_rho.dtype) if weight is None else torch.where(keep, weight, 0.0)
            keep = None
        return CorrectionResult(weight, keep, metrics)

    def weigh_tokens(self, log_rho: Tensor) -> Tensor:
        """[…] → […]: return the weight of tokens with these ratios, 0 for one that a rule rejects."""
        rho = log_rho.clamp(-CLAMP, CLAMP).exp()
        low, high = self.bounds
        weight = torch.ones_like(rho)
        if self.weight == "truncate":
            weight = rho.clamp(max=high)
        elif self.weight == "mask":
            weight = torch.where((rho < low) | (rho > high), 0.0, rho)
        for rule in self.reject:
            weight = torch.where(rule.accepts_token(log_rho), weight, 0.0)
        return weight

    def bounds_ratio(self) -> bool:
        """Return true if it bounds the ratio to the sampler's policy."""
        return self.weight != "none" or bool(self.reject) or self.opsm_delta is not None

    def step_scale(self, view: View) -> float:
        """Return the factor of the learning rate of an update on this batch, over all ranks.

        sqrt_ess: √((Σw)²/(N Σw²)), w = ∏ρ over each of the N rollouts that acted, without truncation.
        """
        if self.step_scaling == "none":
            return 1.0
        log_rho = view.column("old_logp", "`step_scaling`") - view.column("behavior_logp", "`step_scaling`")
        sums = view.ranks.all_reduce(torch.stack(weight_moments(rollout_weights(log_rho, view.rollouts))))
        return math.sqrt(effective_share(*sums)) if float(sums[0]) else 1.0

    def _compute_weight(self, log_rho: Tensor, view: View, metrics: Metrics) -> Tensor:
        rho = importance_weight(log_rho, view.rollouts, self.level)
        low, high = self.bounds
        if self.weight == "truncate":
            cut, weight = rho > high, rho.clamp(max=high)
        else:
            cut = (rho < low) | (rho > high)
            weight = torch.where(cut, 0.0, rho)
        if self.normalize != "none":
            weight = rescale_to_mean_one(weight, view.rollouts, self.normalize, view.ranks)
        share = "correction/truncated_share" if self.weight == "truncate" else "correction/masked_share"
        metrics.add(share, Mean.over(cut.count_nonzero(), len(cut)))
        metrics.add("correction/weight", Mean.over(_total(weight), len(weight)))
        return weight

    def _compute_keep_mask(self, log_rho: Tensor, view: View, metrics: Metrics) -> Tensor:
        keep = torch.ones_like(log_rho, dtype=torch.bool)
        for rule in self.reject:
            keep &= rule.acceptance_mask(log_rho, view.rollouts)
        metrics.add("correction/rejected_share", Mean.over(len(keep) - keep.count_nonzero(), len(keep)))
        return keep
