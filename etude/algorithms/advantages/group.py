"""Advantages of a rollout compared with the others of its group: one number for all of its action tokens.

The functions take rewards [U] in float64 and `group` [U], and return advantages [U]. Groups are complete: no rollout
has been dropped yet. If all rewards of a group of two or more are equal, the advantage is exactly 0: rounding in a mean
must not have a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from etude.algorithms.advantages.base import RolloutAdvantage
from etude.algorithms.advantages.statistics import EPSILON, GroupStatistics
from etude.algorithms.advantages.token import refuse_other_policy, score_energy
from etude.algorithms.base import CLAMP
from etude.algorithms.view import View
from etude.errors import RewardError
from etude.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def grpo(reward: Tensor, group: Tensor) -> Tensor:
    """Return (R − mean) / (std + ε) within the group; R itself in a group of one."""
    groups = GroupStatistics(group)
    return torch.where(groups.is_singleton, reward, groups.centered(reward) / (groups.std(reward) + EPSILON))


def dr_grpo(reward: Tensor, group: Tensor) -> Tensor:
    """Return R − mean within the group; 0 in a group of one."""
    return GroupStatistics(group).centered(reward)


def rloo(reward: Tensor, group: Tensor) -> Tensor:
    """Return R − mean of the others; R itself in a group of one."""
    groups = GroupStatistics(group)
    return torch.where(
        groups.is_singleton, reward, groups.centered(reward) * groups.size / (groups.size - 1).clamp(min=1)
    )


def opo(reward: Tensor, length: Tensor, group: Tensor) -> Tensor:
    """Return R − Σ len·R / Σ len within the group; R itself in a group of one."""
    groups, above = GroupStatistics(group), GroupStatistics(group).above_min(reward)
    length = length.double()
    baseline = groups.sum(length * above) / groups.sum(length).clamp(min=1)
    return torch.where(groups.is_singleton, reward, above - baseline)


def maxrl(reward: Tensor, group: Tensor) -> Tensor:
    """Return (R − mean) / mean within the group; 0 if the mean is 0. Rewards are at least 0."""
    groups = GroupStatistics(group)
    mean = groups.mean(reward)
    return torch.where(mean > 0, groups.centered(reward) / torch.where(mean > 0, mean, 1.0), 0.0)


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


class GRPO(RolloutAdvantage):
    """Group-relative advantage: A = (R − mean_g) / (std_g + ε), with the unbiased standard deviation.

    Source: 2402.03300. Assumes that a group's rollouts are independent attempts at one task. Dividing by the group's
    standard deviation weights tasks by their difficulty, so this is not the gradient of the expected reward.
    Ours: ε = 1e-6 (TRL has 1e-4); a group of one keeps A = R.
    """

    def scales_with_group(self) -> bool:
        return True

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        return grpo(reward, view.batch.group)


class DrGRPO(RolloutAdvantage):
    """GRPO done right: A = R − mean_g.

    Source: 2503.20783, which also sums the loss over a rollout and divides by a constant instead of its length: choose
    `reduction=seq-mean-token-sum-norm` for that. Assumes independent attempts at one task. The mean includes the
    rollout itself, so the gradient is (n − 1)/n of the expected reward's. A group of one has no advantage (A = 0).
    Ours: nothing departs from the source.
    """

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        return dr_grpo(reward, view.batch.group)


class RLOO(RolloutAdvantage):
    """REINFORCE, leave one out: A = R − mean of the others of the group.

    Source: 2402.14740. Assumes independent attempts at one task: the baseline is then independent of the rollout it is
    subtracted from, and the gradient is that of the expected reward.
    Ours: a group of one has no others, and keeps A = R.
    """

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        return rloo(reward, view.batch.group)


class OPO(RolloutAdvantage):
    """Optimal baseline by length: A = R − Σ_g len·R / Σ_g len, len counting action tokens.

    Source: 2505.23585. Assumes that a rollout's squared score grows with its length, which makes this the baseline of
    least variance. It includes the rollout itself, so the gradient is biased, not only by a constant factor.
    Ours: a group of one keeps A = R; one without any action token has no baseline.
    """

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        return opo(reward, view.rollouts.lengths, view.batch.group)


class MaxRL(RolloutAdvantage):
    """Maximum-likelihood reinforcement: A = (R − mean_g) / mean_g, and 0 where the mean is 0.

    Source: 2602.02710. Assumes R ≥ 0; a negative reward is refused. For rewards of 0 and 1 the expectation is the
    gradient of log p (p the probability of success), its series cut after n − 1 terms. There is no ε: the mean of
    rewards of 0 and 1 is 0 or at least 1/n. A group of one has no advantage (A = 0).
    Ours: rewards between 0 and 1 are used unchanged.
    """

    def scales_with_group(self) -> bool:
        return True

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        if bool((reward < 0).any()):
            u = int((reward < 0).nonzero()[0])
            raise RewardError(
                f"The advantage `maxrl` divides by a group's mean reward and needs rewards of at least 0; rollout "
                f"{view.batch.get_rollout_id(u)} has {float(reward[u])}. Shift the rewards up, or choose another "
                "advantage."
            )
        return maxrl(reward, view.batch.group)


class ReMax(RolloutAdvantage):
    """A = R − R(greedy), the reward of the greedy answer to the same task.

    Source: 2310.10505. Assumes that the sampler's policy decoded the greedy answer. This answer is not a rollout of the
    batch. So the baseline is independent, and the gradient is that of the expected reward.
    Ours: nothing departs from the source. Equal rewards need not mean A = 0: the greedy answer may have done worse.
    """

    def required_columns(self) -> frozenset[str]:
        return frozenset({"reward", "greedy_reward"})

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        return reward - view.batch.require("greedy_reward", needed_by="The advantage `remax`").double()


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
