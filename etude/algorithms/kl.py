"""KL terms, which keep the policy close to a reference. Each has the name of its gradient.

δ = log π_θ − log π_ref at an action token, w = π_θ/μ, sg(·) = no gradient through it. As a loss, the gradients are
those of each token with the visited states held fixed:

    name              number                      its gradient                      holds
    reverse           ½δ²  (k2)                   ∇KL(π_θ ‖ π_ref)                  exactly
    weighted_reverse  w·δ (k1) or w·k3            ∇KL(π_θ ‖ π_ref)                  exactly
    full              Σ_v π_θ log(π_θ/π_ref)      ∇KL(π_θ ‖ π_ref)                  exactly, and without sampling noise
    forward           e^{−δ} − 1 + δ  (k3)        ∇KL(π_ref ‖ π_θ)                  exactly; is `reverse` to first order
    total_variation   |δ|                         2 ∇TV(π_θ, π_ref)                 exactly
    sequence          ½(Σδ)², once a rollout      ∇KL of whole sequences            exactly; summed `reverse` is not it
    in_reward         −δ (k1) at π_old            ∇KL of whole sequences            exactly, where the advantage is the
                                                                                    undiscounted reward-to-go or total

Absent on purpose. k1 as a loss: the mean of ∇δ is 0, so it does nothing. ½δ² with w attached: the gradient of the mean
of a square. k3 with sg(w): its gradient is not the reverse one. That of w·k3 with w attached is, and equals that of
sg(w)·½δ² token by token.

Off-policy. `off_policy` weights tokens sampled by μ so that the gradient is that of π_θ. The weight is sg(w) for
`reverse` and `total_variation`, sg(∏w) for `sequence`, and an attached w for `weighted_reverse`. Without `off_policy`,
`weighted_reverse` takes π_θ/sg(π_θ), equal to 1. `full` takes no weight: it does not depend on the sampled token.
A token's weight leaves a bias: the states are still those that μ visited.

Cutting. Only exponents are cut, to ±20, and only in value. So e^{−δ} keeps its gradient where π_ref/π_θ is huge, which
is where it matters. δ itself is never cut. If a log-prob of the reference or of π_old is not finite at an action token,
an error names the rollout.

Sources: 2506.09477, 2510.01555, 2512.21852 (gradients of KL estimators), 2512.02556 (weighted k3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from pydantic import Field

from etude.algorithms.base import CLAMP, Advantage, AlgorithmState, log_ratio
from etude.algorithms.reduce import Reduction
from etude.algorithms.segments import Segments
from etude.algorithms.view import View
from etude.config import Choice, Config
from etude.errors import BatchError, ConfigError
from etude.lazy import torch
from etude.observe import Last, Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor

    from etude.batch import Batch

# -- the coefficient --------------------------------------------------------------------------------------------------


def adapt_coefficient(value: float, *, kl: float, target: float, horizon: float, rollouts: int) -> float:
    """Return value · (1 + clip(kl/target − 1, ±0.2) · rollouts/horizon)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return value * (1 + error * rollouts / horizon)


class KLController(Config, ABC):
    """The controller of a KL term's coefficient. The `AlgorithmState` carries its value from step to step."""

    @abstractmethod
    def current_coefficient(self, coefficient: float, state_value: float | None) -> float:
        """Return the coefficient to use, given the configured one and the value in the state."""

    @abstractmethod
    def next_value(self, value: float, kl: float, rollouts: int) -> float | None:
        """Return the next value, after a step that measured `kl` over `rollouts`."""


class FixedKLController(KLController):
    """The configured coefficient, unchanged."""

    def current_coefficient(self, coefficient: float, state_value: float | None) -> float:  # noqa: ARG002
        return coefficient

    def next_value(self, value: float, kl: float, rollouts: int) -> float | None:  # noqa: ARG002
        return None


class AdaptiveKLController(KLController):
    """A controller to a target: value ← value · (1 + clip(kl/target − 1, ±0.2) · n/horizon), n = rollouts of a step.

    Source: 1909.08593, whose horizon of 10,000 is the default. Its target was for the KL of a sequence. Here kl is the
    mean over rollouts of the mean over tokens, and the default target of 0.1 is ours.
    Assumes n under 5 · horizon, so that the value stays positive; more rollouts are refused.
    """

    target: float = Field(0.1, gt=0, description="the KL per token to settle at")
    horizon: float = Field(10_000, gt=0, description="rollouts over which a coefficient 20 % off target moves by 20 %")

    def current_coefficient(self, coefficient: float, state_value: float | None) -> float:
        return coefficient if state_value is None else state_value

    def next_value(self, value: float, kl: float, rollouts: int) -> float | None:
        if rollouts >= 5 * self.horizon:
            raise ConfigError(
                f"A step has {rollouts} rollouts and `kl.controller.horizon` is {self.horizon:g}: one step could take "
                f"the coefficient to 0 or below. Raise the horizon above {rollouts / 5:g}; with ten times that the "
                f"coefficient changes slowly."
            )
        return adapt_coefficient(value, kl=kl, target=self.target, horizon=self.horizon, rollouts=rollouts)


CONTROLLERS: dict[str, type[KLController]] = {"fixed": FixedKLController, "adaptive": AdaptiveKLController}


# -- the numbers ------------------------------------------------------------------------------------------------------


def k2(delta: Tensor) -> Tensor:
    """Return ½δ²."""
    return 0.5 * delta.square()


def k3(delta: Tensor) -> Tensor:
    """Return e^{−δ} − 1 + δ, with δ cut to ±20 in value and not in gradient."""
    cut = _clamp_straight_through(delta)
    return torch.expm1(-cut) + cut


def sequence_k2(delta: Tensor, rollouts: Segments, log_weight: Tensor | None = None) -> Tensor:
    """[A] → [A]: ½(Σδ)² · ∏w of each rollout, divided equally over its tokens, so that they sum to it."""
    value = k2(rollouts.sum(delta)) / rollouts.lengths.clamp(min=1)
    if log_weight is not None:
        value = value * rollouts.sum(log_weight).clamp(-CLAMP, CLAMP).exp()
    return rollouts.broadcast(value)


def _clamp_straight_through(x: Tensor) -> Tensor:
    bare = x.detach()
    return x + (bare.clamp(-CLAMP, CLAMP) - bare)


# -- the terms --------------------------------------------------------------------------------------------------------


class KLTerm(Config, ABC):
    """A KL to the reference: a term of the loss or of the reward, with its weight."""

    coefficient: float = Field(0.001, gt=0, description="weight of the KL, at first where the controller is adaptive")
    controller: Annotated[KLController, Choice(CONTROLLERS)] = Field(
        FixedKLController(), description="controller of the weight: `fixed`, or `adaptive` to reach a target KL"
    )

    choice_aliases: ClassVar[Mapping[str, str]] = {
        **{"k1": "in_reward", "kl": "in_reward", "k2": "reverse", "mse": "reverse"},
        **{"k3": "forward", "low_var_kl": "forward", "abs": "total_variation"},
    }
    in_reward: ClassVar[bool] = False
    """True if it acts through the reward; otherwise it is a term of the loss."""
    reductions: ClassVar[frozenset[Reduction]] = frozenset(get_args(Reduction))
    """The reductions under which it has the gradient of its name."""

    def required_columns(self) -> frozenset[str]:
        """Return the batch columns that it reads."""
        return frozenset({"old_logp", "ref_logp"})

    def forward_outputs(self) -> frozenset[str]:
        """Return the fields of `Outputs` that the forward pass must compute for it."""
        return frozenset({"logp"})

    @abstractmethod
    def per_token_kl(self, view: View) -> Tensor:
        """[A]: its part of the loss of each action token, before the coefficient and the loss's reduction."""

    def current_coefficient(self, state: AlgorithmState) -> float:
        """Return the coefficient to use with this state."""
        return self.controller.current_coefficient(self.coefficient, state.kl_value)

    def apply(self, view: View, state: AlgorithmState, metrics: Metrics) -> tuple[Batch, AlgorithmState]:
        """Measure the KL of π_old, change the reward and step the controller, once a step, over the rollout batch.

        kl = the mean over rollouts (those without an action count as 0) of the mean δ over a rollout's tokens, over all
        ranks. The batch is trained with the current coefficient; the next step starts with the new one.
        """
        old, ref = (
            view.column(name, needed_by="The KL to the reference").detach() for name in ("old_logp", "ref_logp")
        )
        delta = old - ref
        value, rollouts = self.current_coefficient(state), view.batch.num_rollouts
        total = view.rollouts.mean(delta).sum(dtype=torch.float64)
        if not bool(torch.isfinite(total)):
            raise _non_finite_error(view, delta)
        metrics.add("kl", Mean.over(total, rollouts))
        metrics.add("kl_coefficient", Last.of(value))
        everywhere = view.ranks.all_reduce(torch.stack([total, torch.full_like(total, rollouts)])).tolist()
        held = self.controller.next_value(value, everywhere[0] / everywhere[1], int(everywhere[1]))
        return self.subtract_from_reward(view, delta, value), replace(state, kl_value=held)

    def subtract_from_reward(self, view: View, delta: Tensor, value: float) -> Batch:  # noqa: ARG002
        """Return the batch with value · δ subtracted from its rewards, if the term acts through the reward."""
        return view.batch


class OffPolicyKLTerm(KLTerm):
    """A loss on sampled tokens, which can be weighted to correct for the sampler's policy."""

    off_policy: bool = Field(False, description="weigh samples by π_θ/μ, for rollouts of an older or another policy")

    def required_columns(self) -> frozenset[str]:
        return super().required_columns() | ({"behavior_logp"} if self.off_policy else set())

    def weight(self, view: View) -> Tensor | float:
        """sg(w): [A], or 1 on-policy."""
        return log_ratio(view.logp.detach(), view.column("behavior_logp")).exp() if self.off_policy else 1.0


class ReverseKL(OffPolicyKLTerm):
    """½δ² a token (k2): the gradient of the reverse KL, E_π[δ ∇log π]. Off-policy times sg(π_θ/μ), never attached.

    Sources: 2506.09477, 2510.01555. Assumes visited states held fixed. The usual choice.
    """

    def per_token_kl(self, view: View) -> Tensor:
        return k2(_delta(view)) * self.weight(view)


class ForwardKL(KLTerm):
    """e^{−δ} − 1 + δ a token (k3): the gradient of the forward KL, E_π[(1 − π_ref/π) ∇log π] = −E_ref[∇log π].

    Sources: 2402.03300 (as an estimate of the reverse KL), 2506.09477 (its gradient). Assumes samples of π_θ: there is
    no option for a detached weight. For samples of another policy use `weighted_reverse`, which has a k3.
    """

    def per_token_kl(self, view: View) -> Tensor:
        return k3(_delta(view))


class TotalVariation(OffPolicyKLTerm):
    """|δ| a token: the gradient of Σ_v |π − π_ref|, which is twice the total variation. No pull at δ = 0.

    Source: the estimator is Schulman's "abs"; its gradient 2506.09477. Off-policy times sg(π_θ/μ).
    """

    def per_token_kl(self, view: View) -> Tensor:
        return _delta(view).abs() * self.weight(view)


class FullKL(KLTerm):
    """KL(π_θ ‖ π_ref) summed over the vocabulary at each visited state: the reverse gradient without sampling noise.

    The log-prob head computes it from the logits of both. It does not depend on the sampled token. A weight on that
    token would add noise and correct nothing, so there is no off-policy form.
    """

    def forward_outputs(self) -> frozenset[str]:
        return super().forward_outputs() | {"full_kl"}

    def per_token_kl(self, view: View) -> Tensor:
        return view.output("full_kl", needed_by="The full KL")


class WeightedReverseKL(OffPolicyKLTerm):
    """w·δ or w·k3 a token with the gradient through w too: the gradient of E_μ[w·k] = KL(π_θ ‖ π_ref) itself.

    Sources: 2512.02556 (k3 with π_θ/π_old attached), 2510.01555. On-policy w = π_θ/sg(π_θ): 1, with a gradient.
    Both estimators have the reverse gradient. That of k3 is sg(w)·δ·∇log π in each sample, the same as `reverse`, and
    the value of k3 is never negative. That of k1 has sg(w)·∇log π more, noise of mean zero. w is cut to e^{±20} in
    value only.
    """

    estimator: Literal["k1", "k3"] = Field("k3", description="the number that w multiplies: k3 has less noise")

    def per_token_kl(self, view: View) -> Tensor:
        start = view.column("behavior_logp") if self.off_policy else view.logp.detach()
        delta = _delta(view)
        return _clamp_straight_through(view.logp - start).exp() * (k3(delta) if self.estimator == "k3" else delta)


class SequenceKL(OffPolicyKLTerm):
    """½(Σδ)² a rollout: the gradient of the KL between distributions over whole sequences, E[(Σδ) ∇log π(sequence)].

    Sources: 2506.09477, 2510.01555. A sum of ½δ² over tokens leaves out the effect of an early choice on later states.
    Each token carries an equal part, so it is exact only if a loss adds tokens up; other reductions are refused.
    Off-policy times sg(∏ π_θ/μ), its logarithm cut to ±20.
    """

    reductions: ClassVar[frozenset[Reduction]] = frozenset(
        {"token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"}
    )

    def per_token_kl(self, view: View) -> Tensor:
        delta = _delta(view)
        log_weight = view.logp.detach() - view.column("behavior_logp") if self.off_policy else None
        return sequence_k2(delta, view.rollouts, log_weight)


class RewardKL(KLTerm):
    """−value · δ added to each action token's reward, at π_old and without a gradient: the sequence KL as a cost.

    Source: 1909.08593. Exact for an advantage that is the undiscounted reward-to-go or the total, centered or not. An
    advantage divided by a statistic of its group divides the KL by it too.
    """

    in_reward: ClassVar[bool] = True

    def per_token_kl(self, view: View) -> Tensor:
        return torch.zeros_like(view.logp)

    def subtract_from_reward(self, view: View, delta: Tensor, value: float) -> Batch:
        held = view.batch.token_reward
        paid = view.scatter(torch.zeros_like(delta)) if held is None else held
        return view.batch.replace(token_reward=paid.double().index_add(0, view.action_index, -value * delta.double()))


KLS: dict[str, type[KLTerm]] = {
    "reverse": ReverseKL,
    "forward": ForwardKL,
    "total_variation": TotalVariation,
    "full": FullKL,
    "weighted_reverse": WeightedReverseKL,
    "sequence": SequenceKL,
    "in_reward": RewardKL,
}


def list_warnings(kl: KLTerm, advantage: Advantage) -> list[str]:
    """Return a warning for each combination that runs and is probably a mistake."""
    if not kl.in_reward or not advantage.scales_with_group():
        return []
    return [
        "With `kl=in_reward` this advantage scales the KL by a statistic of its group's rewards, so that its weight "
        "differs from prompt to prompt. Choose `kl=reverse`, or an advantage without such a scale, such as `rloo` or "
        "`dr_grpo`."
    ]


def _delta(view: View) -> Tensor:
    return view.logp - view.column("ref_logp", needed_by="The KL to the reference")


def _non_finite_error(view: View, delta: Tensor) -> BatchError:
    place = int((~torch.isfinite(delta)).nonzero()[0])
    return BatchError(
        f"The KL to the reference is not finite at {view.describe_token(place)}: log π_old − log π_ref = "
        f"{float(delta[place])}. Check that both models score the token at the same temperature and with the same "
        f"tokens masked out."
    )
