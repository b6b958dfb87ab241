"""The reward of a run whose environment gives all rewards."""

from __future__ import annotations

from typing import ClassVar

from etude.records import Task
from etude.rewards.base import RewardFunction


class EnvironmentReward(RewardFunction):
    """0 for every answer, so that only the environment's rewards count, turn by turn."""

    quick: ClassVar[bool] = True
    scores_answers: ClassVar[bool] = False

    @property
    def title(self) -> str:
        return "environment"

    def __call__(self, task: Task, answer: str) -> float:  # noqa: ARG002
        return 0.0
