"""The common part of estimators that give one number to a whole rollout."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from etude.algorithms.advantages.rewards import Rewards
from etude.algorithms.advantages.statistics import measure_advantage
from etude.algorithms.base import Advantage, AdvantageEstimate, AlgorithmState
from etude.algorithms.view import View
from etude.observe import Metrics

if TYPE_CHECKING:
    from torch import Tensor


def estimate_per_rollout(
    advantage: Tensor, view: View, metrics: Metrics, state: AlgorithmState | None = None
) -> AdvantageEstimate:
    """Give each rollout's number [U] to all its action tokens."""
    value = advantage.to(view.dtype)
    metrics.merge(measure_advantage(value, view.ranks, weight=view.rollouts.lengths))
    return AdvantageEstimate(view.rollouts.broadcast(value), state=state, metrics=metrics)


class RolloutAdvantage(Advantage):
    """An estimator with one number for each rollout [U], shared by its action tokens."""

    @abstractmethod
    def advantage(self, reward: Tensor, view: View) -> Tensor:
        """[U] → [U], in float64: each rollout's advantage, given the rewards and the rest of the batch."""

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:  # noqa: ARG002
        reward = Rewards(view).total
        return estimate_per_rollout(self.advantage(reward, view), view, Metrics())
