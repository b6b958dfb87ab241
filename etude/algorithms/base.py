"""The base of every advantage estimator and loss: a frozen, callable object that holds its own options.

A new one is a subclass with its fields, `required_columns`, and one method. Users select it by its name in the table of
its package (`ADVANTAGES`, `LOSSES`), or from outside as `module:Name`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from etude.algorithms.reduce import Denominators, Reduction
from etude.algorithms.view import Unit, View
from etude.config import Config
from etude.errors import ConfigError
from etude.lazy import torch
from etude.observe import Metrics

if TYPE_CHECKING:
    from torch import Tensor

CLAMP = 20.0
"""Log-ratios are cut to ±20 before they are exponentiated: training on a ratio of e^20 makes no sense."""


@dataclass(frozen=True)
class AlgorithmState:
    """The state that algorithms carry from step to step. A checkpoint saves all of it."""

    kl_value: float | None = None
    """The adaptive KL coefficient; None before the first step."""
    role_means: Mapping[int, float] = field(default_factory=dict)
    """RAE's moving average of the reward of each role."""


@dataclass(frozen=True)
class AdvantageEstimate:
    """The result of an estimator: one number for each action token [A], the next state, and metrics."""

    advantage: Tensor  # [A]
    returns: Tensor | None = None  # [A] the critic's target
    state: AlgorithmState | None = None
    """The state of the next step; None leaves it as it is."""
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True)
class LossValue:
    """A loss: a scalar with its gradient, as this micro-batch's share, and metrics."""

    loss: Tensor  # []
    metrics: Metrics = field(default_factory=Metrics)


class Advantage(Config, ABC):
    """An advantage estimator: how much better each choice was than expected."""

    def required_columns(self) -> frozenset[str]:
        """Return the batch columns that it reads. The builder of a run provides them, or refuses the run."""
        return frozenset({"reward"})

    def scales_with_group(self) -> bool:
        """Return true if it divides by, or depends on, a statistic of a group's rewards.

        A term that is added to the rewards then has a different weight from task to task.
        """
        return False

    @abstractmethod
    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:
        """Estimate over the whole rollout batch, before any token is rejected."""


class Loss(Config, ABC):
    """A quantity to minimize: called on each micro-batch, it returns that micro-batch's share of the update's loss."""

    split_unit: ClassVar[Literal["rollout", "group"]] = "rollout"
    """The unit that must stay in one micro-batch."""

    def required_columns(self) -> frozenset[str]:
        """Return the batch columns that it reads."""
        return frozenset()

    def forward_outputs(self) -> frozenset[str]:
        """Return the fields of `Outputs` that the forward pass must compute for it."""
        return frozenset({"logp"})

    @abstractmethod
    def __call__(self, view: View, denominators: Denominators) -> LossValue:
        """Return the share of this micro-batch; `denominators` holds the counts of the update batch."""


class TokenLoss(Loss):
    """A loss with one number for each token [A], and a choice of reductions."""

    reduction: Reduction = Field("token-mean", description="reduction of the tokens' losses to one number")
    norm_length: float | None = Field(None, gt=0, description="length that `seq-mean-token-sum-norm` divides by")
    unit: Unit = Field("rollout", description="extent of a sequence: all action tokens of a rollout, or of one turn")

    is_sequence_level: ClassVar[bool] = False
    """True if its numbers are of whole units before any reduction, so that `unit` matters under every reduction."""

    @model_validator(mode="after")
    def _check_reduction_options(self) -> Self:
        if self.unit == "turn" and self.reduction.startswith("token") and not self.is_sequence_level:
            raise ConfigError(
                f"`unit=turn` has no effect under `reduction={self.reduction}`, which takes no mean over sequences. "
                f"Choose a `seq-mean-…` reduction, or leave `unit` at `rollout`."
            )
        if (self.reduction == "seq-mean-token-sum-norm") != (self.norm_length is not None):
            raise ConfigError(
                "`reduction=seq-mean-token-sum-norm` and `norm_length` belong together: set both, or neither."
            )
        return self

    def required_columns(self) -> frozenset[str]:
        return frozenset({"turn"}) if self.unit == "turn" else frozenset()

    def reduce_terms(self, terms: Tensor, view: View, denominators: Denominators) -> Tensor:
        """[A] → []: reduce one number for each token to this micro-batch's share of the update batch's loss."""
        how, count = self.reduction, max(denominators.count_units(self.unit), 1)
        if how == "token-sum":
            return terms.sum()
        if how == "token-mean":
            return terms.sum() / max(denominators.tokens, 1)
        if how == "seq-mean-token-mean":
            return view.units(self.unit).mean(terms).sum() / count
        if how == "seq-mean-token-sum":
            return terms.sum() / count
        assert self.norm_length is not None, "this reduction is refused without it"
        return terms.sum() / (count * self.norm_length)


class PolicyLoss(TokenLoss):
    """A loss that moves the policy along an advantage: one number for each token, weighted, then reduced.

    Subclasses define `per_token_loss`. Rejected tokens (`keep` false) contribute 0 and still count in the denominators.
    The correction's `weight` multiplies the result of `per_token_loss`, so it acts after PPO's maximum.
    """

    choice_aliases: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("vanilla", "grpo", "bnpo", "dapo", "dr_grpo"), "ppo"),
        "geo_mean": "gmpo",
    }
    weight_levels: ClassVar[frozenset[str]] = frozenset({"token", "sequence", "geometric"})
    """The levels of importance weight that may multiply this loss."""
    uses_old_logp: ClassVar[bool] = True
    """True if it compares with π_old."""
    uses_behavior_logp: ClassVar[bool] = False
    """True if it compares with μ itself, so that a correction's weight would count the mismatch twice."""
    is_tokenwise: ClassVar[bool] = False
    """True if the term of a token depends on that token's log-probs and advantage alone: score centering can then ask
    for the terms of the tokens that were not drawn."""
    has_bound: ClassVar[bool] = False
    """True if it bounds the ratio that it compares, π_θ/π_old or π_θ/μ, by a clip, a mask or a soft weight."""

    def required_columns(self) -> frozenset[str]:
        columns = {"advantage"}
        columns |= {"old_logp"} if self.uses_old_logp else set()
        columns |= {"behavior_logp"} if self.uses_behavior_logp else set()
        return super().required_columns() | columns

    def bounds_ratio(self) -> bool:
        """Return true if it bounds the ratio. Without a bound, a few tokens of an older policy can decide an update."""
        return self.has_bound

    @abstractmethod
    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        """Return the loss of each action token [A] before weights and reduction, and its metrics."""

    def choose_tokens(self, view: View, *, seed: int, step: int) -> Tensor | None:  # noqa: ARG002
        """[A] bool: the tokens that this loss treats separately, picked once over the whole rollout batch, or None.

        It is called after the advantages are estimated. `per_token_loss` reads the result as the column `chosen`.
        """
        return None

    def __call__(self, view: View, denominators: Denominators, expected: Tensor | None = None) -> LossValue:
        """Return the share of this micro-batch. expected: [A], subtracted from the weighted term of each token."""
        terms, metrics = self.per_token_loss(view)
        if terms.shape != view.action_index.shape:
            raise ConfigError(
                f"`per_token_loss` of {type(self).__qualname__} returned a tensor of shape {tuple(terms.shape)}; it "
                f"must return one number for each of the {len(view.action_index)} action tokens, and leave the "
                "reduction to its caller."
            )
        if view.batch.weight is not None:
            terms = terms * view.column("weight")
        if expected is not None:
            terms = terms - expected
        if view.batch.keep is not None:
            terms = torch.where(view.column("keep"), terms, 0.0)
        return LossValue(self.reduce_terms(terms, view, denominators), metrics)


def log_ratio(logp: Tensor, other: Tensor) -> Tensor:
    """Return log(p / q) of each token, cut to ±20."""
    return (logp - other).clamp(-CLAMP, CLAMP)
