"""The algorithm of a run, whole: which estimator, which loss, which KL, which corrections, and the order they act in.

    rollouts ──► estimate ──► update batches ──► objective ──► gradient
                 once a step,                    once a micro-batch,
                 over all rollouts               denominators of the update batch

A run's configuration *is* an `AlgorithmConfig` (it adds the model, the data and the rest), so that what a test flips
here is what a run trains with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.advantages.group import GRPO, MaxRL
from etude.algorithms.advantages.rewards import Rewards
from etude.algorithms.advantages.statistics import measure_rewards
from etude.algorithms.base import Advantage, AlgorithmState, LossValue, PolicyLoss, log_ratio
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

__all__ = ["AlgorithmConfig", "EstimatedBatch"]


@dataclass(frozen=True)
class EstimatedBatch:
    """A rollout batch ready to be trained on."""

    batch: Batch
    state: AlgorithmState
    """What this step's updates are made under: pass it to `compute_loss`."""
    next_state: AlgorithmState
    """What the next step starts from: pass it to the next `estimate`."""
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
                "This loss compares π_old with the sampler, and `correction.policies=two` makes them one, so that "
                "it would do nothing of its own. Set `correction.policies=three`, or choose another loss."
            )
        if self.correction.policies == "two" and "sum_pi_squared" in self.advantage.required_columns():
            raise ConfigError(
                "This advantage compares π_old's probability of a token with Σπ_old² over the vocabulary. With "
                "`correction.policies=two` the first would be the sampler's, and the second the trainer's, which only "
                "the pass tells that `two` leaves out. Set `correction.policies=three`, or choose another advantage."
            )
        if weighs and self.correction.level not in self.loss.weight_levels:
            allowed = " or ".join(sorted(self.loss.weight_levels)) or "none"
            raise ConfigError(
                f"This loss is one number a rollout, and takes weights of level {allowed}; `correction.level` is "
                f"`{self.correction.level}`. Set `correction.level=sequence`, or choose a loss of tokens."
            )
        read = (
            self.advantage.required_columns()
            | self.loss.required_columns()
            | (self.kl.required_columns() if self.kl is not None else set())
        )
        if self.correction.policies == "two" and "old_logp" not in read:
            raise ConfigError(
                "`correction.policies=two` lets μ stand in for π_old, and nothing here reads π_old, so that it would "
                "change nothing. Leave it at `three`: no forward pass is made for a column that nothing needs."
            )
        judged = "reward" in self.advantage.required_columns()
        if not judged and (self.overlong is not None or (self.kl is not None and self.kl.in_reward)):
            option = "`overlong`" if self.overlong is not None else "`kl=in_reward`"
            raise ConfigError(
                f"This advantage does not read the reward, which is all that {option} changes. Leave it out, or choose "
                f"an advantage that compares rewards, such as `grpo`."
            )
        if self.kl is not None and self.kl.in_reward and isinstance(self.advantage, MaxRL):
            raise ConfigError(
                "`advantage=maxrl` needs rewards of at least 0, and `kl=in_reward` takes from them. Choose "
                "`kl=reverse`, or another advantage."
            )
        if self.kl is not None and self.loss.reduction not in self.kl.reductions:
            raise ConfigError(
                f"This KL is a sum over a rollout's tokens, which `loss.reduction={self.loss.reduction}` would divide "
                f"by a length. Set `loss.reduction` to {' or '.join(sorted(self.kl.reductions))}, or choose another KL."
            )
        return self

    def warnings(self) -> list[str]:
        """Return a sentence for each setting that runs and is probably a mistake; the run's start shows them."""
        return [] if self.kl is None else list_warnings(self.kl, self.advantage)

    def required_columns(self) -> frozenset[str]:
        """Every batch column that `estimate` and `compute_loss` read besides those that `estimate` fills."""
        filled = {"advantage", "returns", "weight", "keep", "chosen"}
        needs = (
            self.advantage.required_columns()
            | self.loss.required_columns()
            | self.correction.required_columns()
            | self.entropy.required_columns()
        )
        needs |= self.kl.required_columns() if self.kl is not None else frozenset()
        needs |= {"truncated"} if self.mask_truncated else set()
        needs |= {"observation"} if self.echo else set()
        filled |= {"old_logp"} if self.correction.policies == "two" else set()
        return frozenset(needs - filled)

    def columns_before_estimate(self) -> frozenset[str]:
        """Those of them that must be there before `estimate`: all but π_old, where only the loss reads it. Where one
        update is made of a batch, its own forward pass tells π_old."""
        first = (
            self.advantage.required_columns()
            | self.correction.required_columns()
            | (self.kl.required_columns() if self.kl is not None else set())
        )
        first |= self.loss.required_columns() if "chosen" in self.loss.required_columns() else set()
        return self.required_columns() if "old_logp" in first else self.required_columns() - {"old_logp"}

    def forward_outputs(self) -> frozenset[str]:
        """Return the fields of `Outputs` that a forward pass must compute."""
        outputs = self.loss.forward_outputs() | self.entropy.forward_outputs()
        return outputs | self.kl.forward_outputs() if self.kl is not None else outputs

    def estimate(
        self, batch: Batch, state: AlgorithmState, *, seed: int = 0, step: int = 0, ranks: Ranks | None = None
    ) -> EstimatedBatch:
        """Fill the columns that the objective reads, from quantities known before the update.

        In this order: penalties change the reward, the advantage compares whole groups, only then are tokens weighed
        and rejected, and selections are made over what the batch holds.
        """
        ranks, metrics, view = ranks or SingleRank(), Metrics(), View(batch)
        present = {name for name, _ in batch.columns()}
        if "reward_parts" in self.required_columns() - present:
            raise MissingColumnError(
                "This advantage compares rewards part by part, and the reward gives one number (`reward_parts` is "
                "missing). Have it return {name: number}, or choose `reward=combined`."
            )
        for name in sorted(self.columns_before_estimate() | (self.required_columns() & present)):
            column = batch.require(name, needed_by="This algorithm")
            # A token reward may stand on context too, and is checked where it is read.
            if name != "token_reward" and batch.is_token_column(name) and column.is_floating_point():
                _refuse_non_finite(view, name, view.column(name))
        if batch.reward is not None:
            metrics.merge(measure_rewards(Rewards(view).total, batch.group))
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
                f"{tuple(found.advantage.shape)}; it owes one number for each of the {len(view.action_index)} action "
                "tokens."
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
        """The batch with `weight` and `keep`: what corrections, truncation and the entropy mask make of each token."""
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

        `state` is the one the batch was estimated under. Corrections act on the policy's part alone.
        """
        view, metrics = View(batch, outputs), Metrics()
        if self.correction.opsm_delta is not None:
            view = self._apply_sequence_mask(view, self.correction.opsm_delta, metrics)
        value = self.loss(view, denominators)
        loss = value.loss
        share = batch.num_rollouts / max(
            denominators.rollouts, 1
        )  # of the update batch, so that shares add up to its loss
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

    def _apply_sequence_mask(self, view: View, delta: float, metrics: Metrics) -> View:
        """The view without the rollouts that OPSM drops, which it can say only now that π_θ is known."""
        kept = opsm_mask(view, delta, self.loss.unit)
        metrics.add("opsm_dropped_share", Mean.over((~kept).sum(), len(kept)))
        batch = view.batch
        return View(batch.replace(keep=batch.require("keep") & view.scatter(kept, fill=False)), view.outputs)


def _refuse_non_finite(view: View, name: str, values: Tensor) -> None:
    """No number of an action token may be NaN or infinite: it would pass through every mask."""
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        rollout = int(view.rollouts.locate(torch.tensor([at], device=bad.device)))
        raise BatchError(
            f"The column `{name}` is {float(values[at])} at action token {at - int(view.rollouts.offsets[rollout])} of "
            f"rollout {view.batch.get_rollout_id(rollout)}; it must be finite. Look at what computed it, or leave the "
            f"rollout out."
        )
