"""The complete algorithm of a run: its estimator, loss, KL term and corrections, and the order they act in.

    rollouts ──► estimate ──► update batches ──► compute_loss ──► gradient
                 once a step,                    once a micro-batch,
                 over all rollouts               denominators of the update batch

A run's configuration *is* an `AlgorithmConfig`: it adds the model, the data and the rest. So a run trains with exactly
what a test of this class checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.advantages.group import GRPO, MaxRL
from etude.algorithms.advantages.rewards import Rewards
from etude.algorithms.advantages.statistics import measure_rewards, measure_staleness
from etude.algorithms.base import Advantage, AlgorithmState, LossValue, PolicyLoss, log_ratio
from etude.algorithms.centering import check_alternatives, expected_loss
from etude.algorithms.corrections import CorrectionConfig, opsm_mask
from etude.algorithms.entropy import EntropyConfig, top_entropy_mask
from etude.algorithms.kl import KLS, KLTerm, list_warnings
from etude.algorithms.losses import LOSSES
from etude.algorithms.losses.clip import PPO
from etude.algorithms.losses.supervised import EchoLoss
from etude.algorithms.overlong import OverlongPenalty
from etude.algorithms.reduce import Denominators
from etude.algorithms.view import Outputs, Ranks, SingleRank, View
from etude.config import Choice, Config
from etude.errors import BatchError, ConfigError, MissingColumnError
from etude.lazy import torch
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor

    from etude.batch import Batch


OLD_POLICY_COLUMNS = frozenset({"old_logp", "old_alternative_logp"})
"""The columns of π_old, which a step's first update computes by itself."""


@dataclass(frozen=True)
class EstimatedBatch:
    """A rollout batch ready to be trained on."""

    batch: Batch
    state: AlgorithmState
    """The state of this step's updates: pass it to `compute_loss`."""
    next_state: AlgorithmState
    """The state that the next step starts from: pass it to the next `estimate`."""
    metrics: Metrics


class AlgorithmConfig(Config):
    """The objective of a run: advantage, loss, KL, corrections."""

    advantage: Annotated[Advantage, Choice(ADVANTAGES)] = Field(
        GRPO(), description="estimator of each rollout's advantage"
    )
    loss: Annotated[PolicyLoss, Choice(LOSSES)] = Field(PPO(), description="policy loss that uses the advantage")
    kl: Annotated[KLTerm | None, Choice(KLS)] = Field(
        None, description="KL term that holds the policy to the reference, named by its gradient"
    )
    correction: CorrectionConfig = Field(
        CorrectionConfig(), description="corrections for the mismatch between trainer and sampler"
    )
    entropy: EntropyConfig = Field(
        EntropyConfig(), description="entropy bonus, and training on the most uncertain tokens only"
    )
    overlong: OverlongPenalty | None = Field(None, description="DAPO's soft penalty on answers near the length limit")
    mask_truncated: bool = Field(
        False, description="leave truncated rollouts out of the policy loss; they stay in their group"
    )
    echo: float = Field(0.0, ge=0, description="weight of the cross-entropy on tool output (ECHO); 0 is off")

    @model_validator(mode="after")
    def _check_combination(self) -> AlgorithmConfig:
        weighs = self.correction.weight != "none"
        if weighs and "behavior_logp" in self.loss.required_columns():
            raise ConfigError(
                "This loss already compares with the sampler's log-probs, and `correction.weight` would count the "
                "mismatch twice. Set `correction.weight=none`, or choose another loss."
            )
        if self.correction.policies == "two" and {"old_logp", "behavior_logp"} <= self.loss.required_columns():
            raise ConfigError(
                "This loss compares π_old with the sampler. `correction.policies=two` makes them one, so the loss "
                "would correct nothing. Set `correction.policies=three`, or choose another loss."
            )
        if self.correction.policies == "two" and "sum_pi_squared" in self.advantage.required_columns():
            raise ConfigError(
                "This advantage compares π_old's probability of a token with Σπ_old² over the vocabulary. With "
                "`correction.policies=two` the first is the sampler's and the second the trainer's. Σπ_old² also needs "
                "the forward pass that `two` leaves out. Set `correction.policies=three`, or choose another advantage."
            )
        if weighs and self.correction.level not in self.loss.weight_levels:
            allowed = " or ".join(sorted(self.loss.weight_levels)) or "none"
            raise ConfigError(
                f"This loss has one number for each rollout, and takes weights of level {allowed}; `correction.level` "
                f"is `{self.correction.level}`. Set `correction.level=sequence`, or choose a token-level loss."
            )
        if self.correction.center and not self.loss.is_tokenwise:
            centered = ", ".join(f"`{name}`" for name, loss in LOSSES.items() if loss.is_tokenwise)
            raise ConfigError(
                "`correction.center=true` needs one loss for each token, which depends on that token alone. This loss "
                f"is another one. Choose {centered}, or leave `correction.center` out."
            )
        if self.correction.policies == "two" and "old_logp" not in _columns_of(self.advantage, self.loss, self.kl):
            raise ConfigError(
                "`correction.policies=two` replaces π_old by μ. Nothing here reads π_old, so it would change nothing. "
                "Leave it at `three`: no forward pass is made for a column that nothing needs."
            )
        if "reward" not in self.advantage.required_columns() and (option := self._cost_in_reward()):
            raise ConfigError(
                f"This advantage does not read the reward, and {option} changes nothing else. Leave it out, or choose "
                f"an advantage that compares rewards, such as `grpo`."
            )
        if isinstance(self.advantage, MaxRL) and (option := self._cost_in_reward()):
            raise ConfigError(
                f"`advantage=maxrl` needs rewards of at least 0, and {option} can make them negative. Leave it out "
                "(`kl=reverse` is a loss, and goes with this advantage), or choose another advantage."
            )
        if self.kl is not None and self.loss.reduction not in self.kl.reductions:
            raise ConfigError(
                f"This KL is a sum over a rollout's tokens, which `loss.reduction={self.loss.reduction}` would divide "
                f"by a length. Set `loss.reduction` to {' or '.join(sorted(self.kl.reductions))}, or choose another KL."
            )
        return self

    def _cost_in_reward(self) -> str:
        """Return the option that subtracts from rewards; empty if none does."""
        if self.overlong is not None:
            return "`overlong`"
        return "`kl=in_reward`" if self.kl is not None and self.kl.in_reward else ""

    def warnings(self) -> list[str]:
        """Return a sentence for each setting that runs and is probably a mistake; the run's start shows them."""
        return [] if self.kl is None else list_warnings(self.kl, self.advantage)

    def bounds_sampler_ratio(self) -> bool:
        """Return true if the correction, or the loss, bounds the ratio of the policy to the one that sampled."""
        compares = self.correction.policies == "two" or "behavior_logp" in self.loss.required_columns()
        return self.correction.bounds_ratio() or (compares and self.loss.bounds_ratio())

    def required_columns(self) -> frozenset[str]:
        """Return every batch column that `estimate` and `compute_loss` read, except those that `estimate` fills."""
        filled = {"advantage", "returns", "weight", "keep", "chosen"}
        needs = _columns_of(self.advantage, self.loss, self.kl, self.correction, self.entropy)
        needs |= {"truncated"} if self.mask_truncated else set()
        needs |= {"observation"} if self.echo else set()
        filled |= {"old_logp"} if self.correction.policies == "two" else set()
        return needs - filled

    def columns_before_estimate(self) -> frozenset[str]:
        """Return the required columns that must be there before `estimate`: all but π_old, if only the loss reads it.

        With one update for each batch, π_old comes from the update's own forward pass.
        """
        first = _columns_of(self.advantage, self.correction, self.kl)
        first |= self.loss.required_columns() if "chosen" in self.loss.required_columns() else set()
        return self.required_columns() if "old_logp" in first else self.required_columns() - OLD_POLICY_COLUMNS

    def forward_outputs(self) -> frozenset[str]:
        """Return the fields of `Outputs` that a forward pass must compute."""
        outputs = self.loss.forward_outputs() | self.entropy.forward_outputs()
        outputs |= {"alternative_logp"} if self.correction.center else set()
        return outputs | self.kl.forward_outputs() if self.kl is not None else outputs

    def estimate(
        self, batch: Batch, state: AlgorithmState, *, seed: int = 0, step: int = 0, ranks: Ranks | None = None
    ) -> EstimatedBatch:
        """Fill the columns that the objective reads, from quantities known before the update.

        The order: penalties change the reward; the advantage compares whole groups; then tokens are weighted and
        rejected; last, the loss selects tokens over the whole batch.
        """
        ranks = ranks or SingleRank()
        metrics = Metrics()
        view = View(batch)
        present = {name for name, _ in batch.columns()}
        if "reward_parts" in self.required_columns() - present:
            raise MissingColumnError(
                "This advantage compares rewards part by part, but the reward gives one number (`reward_parts` is "
                "missing). Have it return {name: number}, or choose `reward=combined`."
            )
        for name in sorted(self.columns_before_estimate() | (self.required_columns() & present)):
            column = batch.require(name, needed_by="This algorithm")
            # A token reward may also be on a context token; it is checked where it is read.
            if name != "token_reward" and batch.is_token_column(name) and column.is_floating_point():
                _refuse_non_finite(view, name, view.column(name))
        if self.correction.center:
            check_alternatives(view)
        if batch.reward is not None:
            metrics.merge(measure_rewards(Rewards(view).total, batch.group, batch.greedy_reward))
        metrics.merge(measure_staleness(View(batch, ranks=ranks)))
        if self.correction.policies == "two":
            batch = batch.replace(old_logp=batch.require("behavior_logp"))
        if self.overlong is not None:
            batch = self.overlong.apply_penalty(View(batch), metrics)
        following = state
        if self.kl is not None:
            batch, following = self.kl.apply(View(batch, ranks=ranks), state, metrics)

        view = View(batch, ranks=ranks)
        found = self.advantage(view, following)
        if found.advantage.shape != view.action_index.shape:
            raise ConfigError(
                f"The advantage {type(self.advantage).__qualname__} returned a tensor of shape "
                f"{tuple(found.advantage.shape)}; it must return one number for each of the {len(view.action_index)} "
                "action tokens."
            )
        _refuse_non_finite(view, "advantage", found.advantage)
        metrics.merge(found.metrics)
        batch = batch.replace(advantage=view.scatter(found.advantage))
        if found.returns is not None:
            batch = batch.replace(returns=view.scatter(found.returns))

        view = View(batch, ranks=ranks)
        batch = self._apply_corrections(view, metrics)
        chosen = self.loss.choose_tokens(View(batch, ranks=ranks), seed=seed, step=step)
        if chosen is not None:
            batch = batch.replace(chosen=view.scatter(chosen, fill=False))
        return EstimatedBatch(batch, state, found.state or following, metrics)

    def _apply_corrections(self, view: View, metrics: Metrics) -> Batch:
        """Return the batch with `weight` and `keep`, from the corrections, the truncation and the entropy mask."""
        corrected = self.correction(view)
        metrics.merge(corrected.metrics)
        keep = torch.ones(len(view.action_index), dtype=torch.bool, device=view.batch.device)
        if corrected.keep is not None:
            keep &= corrected.keep
        if self.mask_truncated:
            keep &= ~view.rollouts.broadcast(view.batch.require("truncated"))
        if self.entropy.top_share is not None:
            keep &= top_entropy_mask(view, self.entropy.top_share)
        metrics.add("dropped_share", Mean.over((~keep).sum(), len(keep)))
        weight = None if corrected.weight is None else view.scatter(corrected.weight)
        return view.batch.replace(keep=view.scatter(keep, fill=False), weight=weight)

    def compute_loss(
        self, batch: Batch, outputs: Outputs, denominators: Denominators, state: AlgorithmState
    ) -> LossValue:
        """Return this micro-batch's share of the update batch's loss: policy, KL, entropy, ECHO.

        `state` is the one that the batch was estimated with. Corrections act on the policy loss only.
        """
        metrics = Metrics()
        view = self.apply_sequence_mask(View(batch, outputs), metrics)
        if self.correction.center:
            expected, centered = expected_loss(self.loss, view, self.correction)
            metrics.merge(centered)
            value = self.loss(view, denominators, expected)
        else:
            value = self.loss(view, denominators)
        loss = value.loss
        share = batch.num_rollouts / max(denominators.rollouts, 1)  # of the update batch: shares add up to its loss
        metrics.merge(value.metrics)
        metrics.add("policy_loss", Mean.over(loss.detach(), share))
        if batch.old_logp is not None:
            drift = log_ratio(view.logp.detach(), view.column("old_logp"))
            metrics.add("policy_kl", Mean.over((drift.expm1() - drift).sum(), len(drift)))
        if self.kl is not None and not self.kl.in_reward:
            term = self.loss.reduce_terms(self.kl.per_token_kl(view), view, denominators)
            metrics.add("kl_loss", Mean.over(term.detach(), share))
            loss = loss + self.kl.current_coefficient(state) * term
        if self.entropy.coefficient:
            entropy = view.output("entropy", needed_by="The entropy bonus")
            metrics.add("entropy", Mean.over(entropy.detach().sum(), len(entropy)))
            loss = loss - self.entropy.coefficient * self.loss.reduce_terms(entropy, view, denominators)
        if self.echo:
            echo = EchoLoss()(view, denominators)
            loss = loss + self.echo * echo.loss
            metrics.merge(echo.metrics)
        return LossValue(loss, metrics)

    def apply_sequence_mask(self, view: View, metrics: Metrics) -> View:
        """Return the view without the units that OPSM drops. It needs π_θ, so it acts in each micro-batch."""
        if self.correction.opsm_delta is None:
            return view
        kept = opsm_mask(view, self.correction.opsm_delta, self.loss.unit)
        metrics.add("opsm_dropped_share", Mean.over((~kept).sum(), len(kept)))
        batch = view.batch
        return View(batch.replace(keep=batch.require("keep") & view.scatter(kept, fill=False)), view.outputs)


def _columns_of(*parts: Advantage | PolicyLoss | KLTerm | CorrectionConfig | EntropyConfig | None) -> frozenset[str]:
    """Return the batch columns that these parts read."""
    return frozenset[str]().union(*(part.required_columns() for part in parts if part is not None))


def _refuse_non_finite(view: View, name: str, values: Tensor) -> None:
    """Refuse a NaN or infinite number of an action token: it would pass through every mask."""
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise BatchError(
            f"The column `{name}` is {float(values[at])} at {view.describe_token(at)}; it must be finite. Check the "
            f"code that computed it, or leave the rollout out."
        )
