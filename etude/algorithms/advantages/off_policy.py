"""An advantage for rollouts of an older policy: its baseline has the least variance under importance weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from etude.algorithms.advantages.base import RolloutAdvantage
from etude.algorithms.advantages.statistics import EPSILON, GroupStatistics
from etude.algorithms.advantages.token import refuse_other_policy, score_energy
from etude.algorithms.base import CLAMP
from etude.algorithms.view import View
from etude.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def opob(reward: Tensor, log_weight: Tensor, energy: Tensor, group: Tensor, *, normalize: bool) -> Tensor:
    """Return R − Σ w²ER / Σ w²E within the group, over std + ε with `normalize`; R itself in a group of one.

    log_weight: [U] log w of each rollout. energy: [U] E, the squared norm of its score.
    """
    groups = GroupStatistics(group)
    strength = energy * (2 * log_weight.clamp(-CLAMP, CLAMP)).exp()
    above = groups.above_min(reward)
    baseline = groups.sum(strength * above) / groups.sum(strength).clamp(min=torch.finfo(strength.dtype).tiny)
    advantage = above - baseline
    if normalize:
        advantage = advantage / (groups.std(reward) + EPSILON)
    return torch.where(groups.is_singleton, reward, advantage)


class OPOB(RolloutAdvantage):
    """VCPO's off-policy optimal baseline: A = R − Σ_g w²‖s‖²R / Σ_g w²‖s‖², w = ∏ π_old/μ and s a rollout's score.

    Source: 2602.17616. Of all constants this one has the least variance of the gradient w·s·(R − b), over all rollouts
    of a task. Assumes that the loss is weighted by rollouts: `correction.weight=truncate correction.level=sequence`.
    The authors' runs have `correction.high=8`. VCPO also scales its steps: `correction.step_scaling=sqrt_ess`. The
    baseline includes the rollout itself, so it is biased.
    Ours: the source takes s over all weights of the model, by a backward pass for each rollout. Here s is over the
    logits, ‖s‖² = Σ_t (1 − 2π_t + Σπ²_t), with π_old's own probabilities, as in `token_baseline`. log w is cut to ±20,
    and not truncated further. A group of one keeps A = R.
    """

    normalize: bool = Field(
        False, description="divide by the group's standard deviation, as the authors do together with GRPO"
    )

    def required_columns(self) -> frozenset[str]:
        return frozenset({"reward", "behavior_logp", "old_logp", "sum_pi_squared"})

    def scales_with_group(self) -> bool:
        return self.normalize

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        by = "The advantage `opob`"
        old, squares = view.column("old_logp", by).double(), view.column("sum_pi_squared", by).double()
        refuse_other_policy(view, old.exp(), squares, by)
        log_weight = view.rollouts.sum(old - view.column("behavior_logp", by).double())
        energy = view.rollouts.sum(score_energy(old, squares))
        return opob(reward, log_weight, energy, view.batch.group, normalize=self.normalize)
