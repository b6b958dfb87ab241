"""Advantages of turns: one number for all action tokens of a turn, from the rewards of turns.

Turn k of a rollout is its k-th turn with an action token. Its reward r_k is the sum of its token rewards; the last turn
also gets the rollout's own reward. Turns are flat columns [S], in time order, rollout by rollout.

    rollout  u0              u1
    turn     0    1    2     0    1
    column   r_0  r_1  r_2   r_0  r_1
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from etude.algorithms.advantages.group import grpo
from etude.algorithms.advantages.rewards import Rewards
from etude.algorithms.advantages.statistics import EPSILON, GroupStatistics, measure_advantage
from etude.algorithms.base import Advantage, AdvantageEstimate, AlgorithmState
from etude.algorithms.segments import Segments
from etude.algorithms.view import View
from etude.errors import ConfigError
from etude.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class TurnRewards:
    """The S turns of a batch, and the rewards of each."""

    view: View

    @cached_property
    def rollout(self) -> Tensor:
        """[S]: the rollout of each turn."""
        return self.view.rollouts.locate(self.view.turns.offsets[:-1])

    @cached_property
    def rollouts(self) -> Segments:
        """The rollouts as ranges of turns."""
        return Segments(torch.bincount(self.rollout, minlength=self.view.batch.num_rollouts))

    @cached_property
    def group(self) -> Tensor:
        """[S]: the group of each turn."""
        return self.view.batch.group[self.rollout]

    @cached_property
    def is_last(self) -> Tensor:
        """[S] bool: the rollout's last turn."""
        return self.rollouts.position == self.rollouts.broadcast(self.rollouts.lengths) - 1

    @cached_property
    def rewards(self) -> Rewards:
        """The rewards of the rollouts."""
        return Rewards(self.view)

    @cached_property
    def token_rewards(self) -> Tensor:
        """[S] float64: the sum of each turn's token rewards."""
        place, amount = self.rewards.sparse_token_rewards
        return amount.new_zeros(self.view.turns.count).index_add_(0, self.view.turns.locate(place), amount)

    @cached_property
    def rollout_rewards(self) -> Tensor:
        """[S] float64: the own reward of each turn's rollout."""
        return self.rewards.rollout_rewards[self.rollout]

    @cached_property
    def reward(self) -> Tensor:
        """[S] float64: r_k, with the rollout's own reward at its last turn."""
        return torch.where(self.is_last, self.token_rewards + self.rollout_rewards, self.token_rewards)

    def group_by_turn(self, chosen: Tensor) -> GroupStatistics:
        """Group the chosen turns [S] bool with the turns of the same number k in their group."""
        most = int(self.rollouts.lengths.max()) if self.rollouts.size else 1
        return GroupStatistics((self.group * most + self.rollouts.position)[chosen])


class TurnAdvantage(Advantage):
    """An estimator with one number for each turn [S], shared by its action tokens."""

    def required_columns(self) -> frozenset[str]:
        return frozenset({"reward", "token_reward", "turn"})

    @abstractmethod
    def advantage(self, turns: TurnRewards) -> Tensor:
        """[S], in float64: each turn's advantage."""

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:  # noqa: ARG002
        value = self.advantage(TurnRewards(view)).to(view.dtype)
        metrics = measure_advantage(value, view.ranks, weight=view.turns.lengths)
        return AdvantageEstimate(view.turns.broadcast(value), metrics=metrics)


def subtract_others_mean(values: Tensor, turns: TurnRewards) -> Tensor:
    """[S] → [S]: x_k − the mean, over the group's other rollouts, of their x_k; a missing turn k counts as 0.

    A rollout without an action counts at turn 0 with the sum of its rewards. If all values compared are equal, the
    result is exactly 0. In a group of one nothing is subtracted.
    """
    idle = (turns.rollouts.lengths == 0).nonzero()[:, 0]
    every = torch.cat([values, turns.rewards.total[idle]])
    rollout = torch.cat([turns.rollout, idle])
    number = torch.cat([turns.rollouts.position, torch.zeros_like(idle)])
    group = turns.view.batch.group
    stages = int(number.max()) + 1 if len(number) else 1
    stage = GroupStatistics(group[rollout] * stages + number)
    size = GroupStatistics(group).size[rollout]
    # Subtract the minimum first, so that equal values leave no rounding error.
    above = every - torch.where((stage.size == size) & (size > 1), stage.min(every), 0.0)
    others = (stage.sum(above) - above) / (size - 1).clamp(min=1)
    return (above - others)[: len(values)]


def center_within(values: Tensor, groups: GroupStatistics, *, normalize: bool) -> Tensor:
    """[S] → [S]: x − mean within these groups, divided by their std + ε if `normalize`; 0 in a group of one."""
    centred = groups.centered(values)
    return centred / (groups.std(values) + EPSILON) if normalize else centred


class StepRewardAdvantage(TurnAdvantage):
    """A turn's own rewards as its advantage, plain or against the group.

    `to_go`: x_k = r_k + γ x_{k+1} over the turns of a rollout. `final_to_all`: x_k = the turn's token rewards + the
    rollout's own reward, at every turn. A = x_k, or with `baseline=group` A = x_k − the mean of the other rollouts'
    x_k, absent turns counting 0 (see `turn_baseline`).
    Source: the reward shapings of multi-turn recipes (compared in 2505.11821). Assumes rewards that are meaningful at
    each turn; `final_to_all` counts the final reward once for each turn, so that it is not the gradient of the sum.
    Ours: γ counts turns, not tokens; the baseline is independent of the rollout.
    """

    how: Literal["to_go", "final_to_all"] = Field(
        "to_go", description="rewards that a turn gets: those still to come, or the rollout's final reward"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="the discount of one turn, for `to_go`")
    baseline: Literal["none", "group"] = Field(
        "none", description="the baseline that is subtracted: nothing, or the mean of the group's other rollouts"
    )

    @model_validator(mode="after")
    def _discount_has_an_effect(self) -> StepRewardAdvantage:
        if self.how == "final_to_all" and self.gamma != 1:
            raise ConfigError(
                f"`gamma` is {self.gamma}, and `how=final_to_all` discounts nothing. Leave `gamma` at 1, or set "
                f"`how=to_go`."
            )
        return self

    def advantage(self, turns: TurnRewards) -> Tensor:
        to_all = self.how == "final_to_all"
        values = (
            turns.token_rewards + turns.rollout_rewards
            if to_all
            else turns.rollouts.suffix_sum(turns.reward, self.gamma)
        )
        return subtract_others_mean(values, turns) if self.baseline == "group" else values


class TurnBaseline(TurnAdvantage):
    """A_k = Σ_{j≥k} r_j − the mean of the group's other rollouts' Σ_{j≥k} r_j, absent turns counting 0.

    The form of RLOO for turns. Its gradient is that of the expected reward, because the baseline of turn k comes from
    other rollouts only: all of them, also those that have no turn k. Assumes independent attempts at one task.
    Ours: a rollout without an action counts at turn 0 with its reward; in a group of one the baseline is 0. Rewards
    with equal sums may still differ turn by turn: A is exactly 0 where all Σ_{j≥k} r_j compared are equal.
    """

    def advantage(self, turns: TurnRewards) -> Tensor:
        return subtract_others_mean(turns.rollouts.suffix_sum(turns.reward), turns)


class TurnBaselineBiased(TurnAdvantage):
    """A_k = Σ_{j=k}^{own stop} (r_j − b_j), b_j the mean of r_j over the group's rollouts that have a turn j.

    Common in agent training. Biased: b_j includes the rollout itself, and is summed up to the rollout's own stop, so
    that stopping early or late is itself rewarded. It is here for comparison; `turn_baseline` is not biased.
    Ours: nothing departs from the common form; a turn that no other rollout has is its own mean and adds 0.
    """

    def advantage(self, turns: TurnRewards) -> Tensor:
        surplus = center_within(turns.reward, turns.group_by_turn(torch.ones_like(turns.is_last)), normalize=False)
        return turns.rollouts.suffix_sum(surplus)


class MTGRPO(TurnAdvantage):
    """Multi-turn GRPO: A_k = A^outcome + λ A^turn_k before the last turn, A^outcome at it; each normalized as in GRPO.

    A^outcome is over the group's rollouts: own reward, plus the token rewards of the last turn. A^turn_k is over the
    turns of the same number k in the group that are not their rollout's last.
    Source: 2505.11821, λ = 1 as in its published settings. Assumes that turns of the same number are comparable: in the
    source every rollout has the same two turns.
    Ours: any number of turns; a turn that no other rollout has adds nothing, and a group of one keeps its outcome.
    """

    turn_weight: float = Field(1.0, ge=0, description="λ: weight of a turn's own reward beside the outcome")

    def scales_with_group(self) -> bool:
        return True

    def advantage(self, turns: TurnRewards) -> Tensor:
        inner = ~turns.is_last
        outcome = turns.rewards.rollout_rewards.index_add(
            0, turns.rollout, torch.where(inner, 0.0, turns.token_rewards)
        )
        of_turns = torch.zeros_like(turns.token_rewards)
        of_turns[inner] = center_within(turns.token_rewards[inner], turns.group_by_turn(inner), normalize=True)
        return grpo(outcome, turns.view.batch.group)[turns.rollout] + self.turn_weight * of_turns


class GiGPO(TurnAdvantage):
    """Group in group: A_k = A^episode + ω A^step_k, the step compared with all turns of the group in the same state.

    A^episode = R − mean_g over rollouts. A^step_k = x_k − mean over the turns with the same anchor in the group, where
    x_k = Σ_{j≥k} γ^{j−k} r_j over turns. `normalize` divides each by its standard deviation + 1e-6.
    Source: 2505.10978; ω = 1 and γ = 0.95 as in its published settings. Assumes that states recur within a group, and
    that an anchor identifies them: the column `anchor` at each turn's first action token. A state that occurs once adds
    nothing.
    Ours: a rollout counts once in A^episode, for any number of turns; a group of one keeps A^episode = R.
    """

    step_weight: float = Field(1.0, ge=0, description="ω: weight of the comparison between steps from the same state")
    gamma: float = Field(0.95, ge=0, le=1, description="the discount of one turn in what a step is worth")
    normalize: bool = Field(False, description="divide each comparison by its standard deviation")

    def scales_with_group(self) -> bool:
        return self.normalize

    def required_columns(self) -> frozenset[str]:
        return frozenset({"reward", "turn", "anchor"})

    def advantage(self, turns: TurnRewards) -> Tensor:
        view, group = turns.view, turns.view.batch.group
        first = view.action_index[view.turns.offsets[:-1]]
        states, anchor = torch.unique(
            view.batch.require("anchor", needed_by="The advantage `gigpo`")[first], return_inverse=True
        )
        alike = GroupStatistics(torch.unique(turns.group * len(states) + anchor, return_inverse=True)[1])
        step = center_within(turns.rollouts.suffix_sum(turns.reward, self.gamma), alike, normalize=self.normalize)
        episodes = GroupStatistics(group)
        outcome = center_within(turns.rewards.total, episodes, normalize=self.normalize)
        episode = torch.where(episodes.is_singleton, turns.rewards.total, outcome)
        return episode[turns.rollout] + self.step_weight * step
