"""Advantages of single tokens: from rewards to go, from a critic's values, or from a teacher.

The functions take flat columns [A] of action tokens in time order, and the rollouts as segments of them. A time step
goes from one action token to the next of the same rollout, over all tokens between them; γ counts those steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from etude.algorithms.advantages.rewards import Rewards
from etude.algorithms.advantages.statistics import GroupStatistics, measure_advantage, moments, whiten
from etude.algorithms.base import Advantage, AdvantageEstimate, AlgorithmState, log_ratio
from etude.algorithms.segments import Segments
from etude.algorithms.sources import means_by_source, source_weights
from etude.algorithms.view import Ranks, View
from etude.errors import BatchError
from etude.lazy import torch
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor

SQUARES_SLACK = 1e-3
"""The relative distance that Σπ² may have from the range π allows: above float32 rounding, below a second policy's."""


def gae(
    rewards: Tensor, values: Tensor, rollouts: Segments, *, gamma: float, lam: float, final_value: Tensor | None = None
) -> Tensor:
    """Return A_t = δ_t + γλ A_{t+1}, with δ_t = r_t + γ V_{t+1} − V_t, over the action tokens of each rollout.

    final_value: [U] the value of the state after a rollout's last action; without it that state is terminal, value 0.
    """
    following = rollouts.shift(values)
    if final_value is not None:
        acted = rollouts.lengths > 0
        following = following.index_copy(0, (rollouts.offsets[1:] - 1)[acted], final_value[acted])
    return rollouts.suffix_sum(rewards + gamma * following - values, gamma * lam)


def score_energy(logp: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """[A]: 1 − 2π + Σπ², the squared norm of a token's score over its logits."""
    others = (sum_pi_squared - (2 * logp).exp()).clamp(min=0)  # below 0 only by rounding: see `refuse_other_policy`
    return torch.expm1(logp).square() + others  # (1 − π)² + Σ_{v≠a} π_v², which does not cancel where π is near 1


def optimal_token_baseline(
    rewards: Tensor, logp: Tensor, sum_pi_squared: Tensor, rollouts: Segments, group: Tensor, floor: Tensor
) -> Tensor:
    """Return G_t − Σ_g G_t W_t / Σ_g W_t, with W_t = Σ_{j≤t} (1 − 2π_j + Σπ²_j), t counting a rollout's action tokens.

    Only rollouts that reach t are in the sums; with fewer than two, the baseline is 0.
    rewards: [A] r_t, less `floor` at each rollout's last action token, so that G_t is measured from `floor`.
    floor: [U] one number for each group. Any number is correct; if it equals all of a group's G_t, A is exactly 0.
    """
    above = rollouts.suffix_sum(rewards)
    energy = score_energy(logp, sum_pi_squared)
    weight = rollouts.cumsum(energy.to(rewards.dtype))

    # One cell for each group and t; a group has as many as its longest rollout has tokens.
    groups = int(group.max()) + 1 if len(group) else 0
    longest = torch.zeros(groups, dtype=torch.int64, device=group.device)
    cells = Segments(longest.scatter_reduce_(0, group, rollouts.lengths, "amax"))
    shift = cells.offsets[:-1][group] - rollouts.offsets[:-1]
    cell = rollouts.broadcast(shift) + torch.arange(rollouts.size, device=group.device)
    total = torch.zeros(cells.size, dtype=torch.float64, device=group.device)
    weights = torch.zeros_like(total).index_add_(0, cell, weight.double())
    total.index_add_(0, cell, (above * weight).double())

    floors = cells.broadcast(floor.new_zeros(cells.count).index_copy_(0, group, floor))
    compared = torch.bincount(cell, minlength=cells.size) > 1
    baseline = torch.where(compared, total / weights.clamp(min=torch.finfo(total.dtype).tiny), -floors)
    return above - baseline.to(above.dtype).index_select(0, cell)


class GAE(Advantage):
    """Generalized advantage estimation: A_t = δ_t + γλ A_next, δ_t = r_t + γ V_next − V_t; returns = A + V.

    Source: 1506.02438. Assumes a critic; the gradient is exact only for γ = λ = 1, or where V is the policy's value.
    "Next" is the rollout's next action token, over tool output and over the rollout's rows.
    A truncated rollout has not ended. By default the state after its last action still has the value 0. With
    `bootstrap_truncated` it has the critic's estimate, from the unit column `final_value`, where `truncated` is true.
    Ours: γ = λ = 1 by default, usual for language models. Whitening is over the action tokens of the rollout batch,
    after the returns are computed, and off by default.
    """

    gamma: float = Field(1.0, ge=0, le=1, description="the discount of one action token")
    lam: float = Field(1.0, ge=0, le=1, description="λ: 1 trusts the rewards to come, 0 the critic's next value")
    whiten: bool = Field(False, description="rescale the advantages of the rollout batch to mean 0 and variance 1")
    bootstrap_truncated: bool = Field(
        False, description="value the state that a truncated rollout ended in by the column `final_value`"
    )

    def required_columns(self) -> frozenset[str]:
        more = {"truncated", "final_value"} if self.bootstrap_truncated else set()
        return frozenset({"reward", "value"} | more)

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:  # noqa: ARG002
        batch, values = view.batch, view.column("value", needed_by="The advantage `gae`").to(view.dtype)
        final = None
        if self.bootstrap_truncated:
            after = batch.require("final_value", needed_by="`bootstrap_truncated`").to(view.dtype)
            final = torch.where(batch.require("truncated", needed_by="`bootstrap_truncated`"), after, 0.0)
        rewards = Rewards(view).per_token(view.dtype)
        found = gae(rewards, values, view.rollouts, gamma=self.gamma, lam=self.lam, final_value=final)
        returns = found + values
        metrics = _explained_variance(found, returns, view.ranks)
        if self.whiten:
            found = whiten(found, view.ranks)
        metrics.merge(measure_advantage(found, view.ranks))
        return AdvantageEstimate(found, returns=returns, metrics=metrics)


def _explained_variance(error: Tensor, returns: Tensor, ranks: Ranks) -> Metrics:
    """Measure the share of the returns' variance that the critic explains: 1 − var(returns − V) / var(returns)."""
    spread = float(moments(returns, ranks)[1])
    left = float(moments(error, ranks)[1])
    return Metrics({"explained_variance": Mean.of(1 - left / spread)} if spread > 0 else {})


class ReinforcePP(Advantage):
    """REINFORCE++: G_t = r_t + γ G_next, whitened over the action tokens of the rollout batch.

    Source: 2501.03262. Assumes rewards of one scale over tasks, since all are compared with one mean.
    Whitening: (G − mean)/(std + ε), with the unbiased std, over all ranks and before any token is rejected.
    Ours: γ counts action tokens, never tool output, and token rewards on context tokens count for the action before.
    """

    gamma: float = Field(1.0, ge=0, le=1, description="the discount of one action token")

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:  # noqa: ARG002
        rewards = Rewards(view).per_token(view.dtype)
        found = whiten(view.rollouts.suffix_sum(rewards, self.gamma), view.ranks)
        return AdvantageEstimate(found, metrics=measure_advantage(found, view.ranks))


class OptimalTokenBaseline(Advantage):
    """A_t = G_t − Σ_g G_t W_t / Σ_g W_t, the t-th action tokens of a group compared, W_t = Σ_{j≤t} (1 − 2π_j + Σπ²_j).

    Source: 2602.07078. W stands for the squared norm of the score up to t, from π_old's own probabilities; G is the
    reward to go, undiscounted. Assumes that the t-th tokens of a group's rollouts are comparable. The baseline includes
    the rollout itself, so it is biased. A rollout that has ended leaves both sums. Beyond the end of the second-longest
    rollout the baseline is 0, so equal rewards give A = 0 except on that tail.
    Ours: t counts action tokens only; the sums over a group are in float64. 1 − 2π + Σπ² is summed as
    (1 − π)² + Σπ² − π², which does not cancel where the policy is sure. π and Σπ² must be of one policy: values that no
    distribution has are refused. So is `correction.policies=two`, where π is the sampler's and Σπ² the trainer's.
    """

    def required_columns(self) -> frozenset[str]:
        return frozenset({"reward", "old_logp", "sum_pi_squared"})

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:  # noqa: ARG002
        group = view.batch.group
        earned = Rewards(view)
        by = "The advantage `token_baseline`"
        floor = GroupStatistics(group).min(earned.total)
        logp, sum_pi_squared = view.column("old_logp", by), view.column("sum_pi_squared", by)
        refuse_other_policy(view, logp.double().exp(), sum_pi_squared.double(), by)
        found = optimal_token_baseline(
            earned.per_token(view.dtype, baseline=floor),
            logp,
            sum_pi_squared,
            view.rollouts,
            group,
            floor,
        )
        return AdvantageEstimate(found, metrics=measure_advantage(found, view.ranks))


def refuse_other_policy(view: View, pi: Tensor, squares: Tensor, needed_by: str) -> None:
    """Refuse Σπ² below π² or above π² + (1 − π)²: no distribution in which this token has π gives it."""
    slack = SQUARES_SLACK * squares
    bad = (pi.square() > squares + slack) | (squares - slack > pi.square() + (1 - pi).square())
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise BatchError(
            f"{needed_by} found π = {float(pi[at]):g} and Σπ² = {float(squares[at]):g} at {view.describe_token(at)}, "
            "which no distribution has. Compute `old_logp` and `sum_pi_squared` with the same policy, at the same "
            "temperature."
        )


class OnPolicyDistillation(Advantage):
    """A_t = −sg(log π_old − log π_teacher): the teacher's log-prob of a token minus the policy's.

    It is the reverse KL to the teacher, one token at a time, with the visited states held fixed. A token's effect on
    the KL of later tokens is left out (token-local). The formula is that of the on-policy distillation literature.
    Assumes that the teacher scored the sampled tokens, at the policy's temperature. Reads no reward.
    Ours: the log-ratio is cut to ±20, as everywhere. `weights` multiplies A by a number of the task's data source.
    """

    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {},
        description="factor of the advantages of each data source, by its name; 1 for those not named. Larger learns "
        "more from the source's teacher, 0 nothing",
    )

    def required_columns(self) -> frozenset[str]:
        return frozenset({"old_logp", "teacher_logp"} | ({"source"} if self.weights else set()))

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:  # noqa: ARG002
        by = "The advantage `distillation`"
        found = -log_ratio(view.column("old_logp", by), view.column("teacher_logp", by)).to(view.dtype)
        metrics = Metrics({"teacher_kl": Mean.over(-found.sum(), len(found))})
        metrics.merge(means_by_source(view, "teacher_kl", -found))
        if self.weights:
            found = found * source_weights(view, self.weights, by)
        metrics.merge(measure_advantage(found, view.ranks))
        return AdvantageEstimate(found, metrics=metrics)
