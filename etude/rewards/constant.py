"""Rewards of 0 for every answer: for runs that need no reward, and for those whose environment gives all rewards."""

from __future__ import annotations

from typing import ClassVar

from etude.records import Task
from etude.rewards.base import RewardFunction


class NoReward(RewardFunction):
    """0 for every answer. A run that trains from a teacher's targets may need no reward."""

    quick: ClassVar[bool] = True

    def __call__(self, task: Task, answer: str) -> float:  # noqa: ARG002
        return 0.0


class EnvironmentReward(RewardFunction):
    """0 for every answer, so that only the environment's rewards count, turn by turn."""

    quick: ClassVar[bool] = True

    @property
    def title(self) -> str:
        return "environment"

    @property
    def scores_answers(self) -> bool:
        return False

    def __call__(self, task: Task, answer: str) -> float:  # noqa: ARG002
        return 0.0
