"""Advantages of a rollout that also read the whole rollout batch: its spread, or its share of unequal groups.

Statistics of the batch are those of all ranks together. So each rank, with some of the groups, gets the same result as
one rank with all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from etude.algorithms.advantages.base import RolloutAdvantage, estimate_per_rollout
from etude.algorithms.advantages.group import dr_grpo, grpo
from etude.algorithms.advantages.statistics import EPSILON, GroupStatistics, moments, whiten
from etude.algorithms.base import Advantage, AdvantageEstimate, AlgorithmState
from etude.algorithms.view import Ranks, View
from etude.errors import ConfigError
from etude.lazy import torch
from etude.observe import Metrics
from etude.records import has_zero_variance

if TYPE_CHECKING:
    from torch import Tensor


def batch_mean(reward: Tensor, ranks: Ranks) -> Tensor:
    """Return R − mean over the rollout batch; exactly 0 if all rewards are equal, and for a batch of one."""
    every = ranks.all_gather(reward)
    if len(every) == 0 or bool(has_zero_variance(every.min(), every.max(), torch.finfo(every.dtype).eps)):
        return torch.zeros_like(reward)
    return (reward - every.min()) - (every - every.min()).mean()


def batch_std(reward: Tensor, group: Tensor, ranks: Ranks) -> Tensor:
    """Return (R − mean) / (std of all R − mean + ε), the mean within the group, the std over the rollout batch."""
    centred = dr_grpo(reward, group)
    return centred / (moments(centred, ranks)[1].sqrt() + EPSILON)


def gpg(reward: Tensor, group: Tensor, ranks: Ranks, *, f_norm: float) -> Tensor:
    """Return α·(R − mean) / f_norm, α = rollouts / rollouts in groups whose rewards differ."""
    groups = GroupStatistics(group)
    differ = (~groups.has_zero_variance(reward) & ~groups.is_singleton).double()
    every, teaching = ranks.all_reduce(torch.stack([torch.ones_like(differ).sum(), differ.sum()])).unbind()
    return groups.centered(reward) * (every / teaching.clamp(min=1)) / f_norm


def reinforce_pp_baseline(reward: Tensor, length: Tensor, group: Tensor, ranks: Ranks) -> Tensor:
    """Return R − mean within the group (R in a group of one), whitened: a rollout counts `length` times."""
    groups = GroupStatistics(group)
    return whiten(torch.where(groups.is_singleton, reward, groups.centered(reward)), ranks, weight=length)


def gdpo(parts: Tensor, weights: Tensor, group: Tensor, ranks: Ranks) -> Tensor:
    """Normalise each part [U, parts] within its group, and whiten their weighted sum over rollouts."""
    normal = torch.stack([grpo(part, group) for part in parts.unbind(1)], 1)
    return whiten((normal * weights).sum(1), ranks)


class BatchMean(RolloutAdvantage):
    """A = R − mean of R over the rollout batch, with no comparison within a group.

    Source: FlashREINFORCE (NVIDIA, September 2026; github.com/yifanzhang-pro/FlashREINFORCE, no arXiv number). Assumes
    one rollout for each task and rewards of one scale: the baseline is the mean reward of a batch's tasks. The
    mean includes the rollout itself, so the gradient is (N − 1)/N of the expected reward's, N rollouts in the batch.
    Ours: the mean over all ranks. Groups of several rollouts are allowed, and are not compared within.
    """

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        return batch_mean(reward, view.ranks)


class BatchStd(RolloutAdvantage):
    """A = (R − mean_g) / (σ + ε), where σ is the standard deviation of R − mean_g over the rollout batch.

    Sources: 2508.08221, and ScaleRL 2510.13786. Assumes that rewards of different tasks are on one scale. Dividing all
    by the same number keeps the tasks' weights; GRPO's division does not.
    Ours: the unbiased deviation, over all ranks; ε = 1e-6. A group of one has A = 0, being its own mean.
    """

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        return batch_std(reward, view.batch.group, view.ranks)


class GPGAdvantage(RolloutAdvantage):
    """Group policy gradient: A = α (R − mean_g) / f_norm, α = rollouts / rollouts in groups whose rewards differ.

    Source: 2504.02546. Assumes that groups of equal rewards are a matter of chance: α gives their weight to the others.
    Ours: α is taken over the rollout batch of all ranks; the divisor is a constant, 1 unless configured. A group of
    one has A = 0, like a group of equal rewards.
    """

    f_norm: float = Field(1.0, gt=0, description="the constant that the centered reward is divided by")

    def scales_with_group(self) -> bool:
        return True  # any difference makes a group count

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        return gpg(reward, view.batch.group, view.ranks, f_norm=self.f_norm)


class ReinforcePPBaseline(RolloutAdvantage):
    """REINFORCE++ with a group baseline: A = R − mean_g, whitened over the action tokens of the rollout batch.

    Source: 2501.03262. Assumes rewards of one scale over tasks. Whitening: (A − mean)/(std + ε), with the
    unbiased std, each rollout counted once for each action token, before any token is rejected.
    Ours: a group of one enters the whitening with R. After whitening the mean of all tokens is 0, so a group of equal
    rewards need not stay at 0.
    """

    def advantage(self, reward: Tensor, view: View) -> Tensor:
        return reinforce_pp_baseline(reward, view.rollouts.lengths, view.batch.group, view.ranks)


class GDPO(Advantage):
    """Decoupled normalization: A = whiten(Σ_p w_p · (R_p − mean_g) / (std_g + ε)), over the parts p of the reward.

    Source: 2601.05242. Assumes that each part should be compared on its own scale: a part that varies much does not
    outweigh one that varies little. Whitened over the rollouts of the batch, each counted once.
    Ours: whitening divides by the unbiased std + ε; a group of one keeps R_p, then is whitened. It reads only the
    parts: a penalty on the whole reward, or a token reward, does not change this advantage.
    """

    weights: dict[str, float] = Field(
        default_factory=dict, description="the weight of each part of the reward by name; 1 for those not named"
    )

    def required_columns(self) -> frozenset[str]:
        return frozenset({"reward_parts"})

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:  # noqa: ARG002
        batch = view.batch
        parts = batch.require("reward_parts", needed_by="The advantage `gdpo`").double()
        unknown = sorted(self.weights.keys() - set(batch.part_names))
        if unknown:
            raise ConfigError(
                f"`weights` of the advantage `gdpo` names the reward part `{unknown[0]}`; the rewards of this batch "
                f"have the parts {', '.join(batch.part_names)}. Correct the name, or have the reward give that part."
            )
        weights = parts.new_tensor([self.weights.get(name, 1.0) for name in batch.part_names])
        found = gdpo(parts, weights, batch.group, view.ranks)
        return estimate_per_rollout(found, view, Metrics())
