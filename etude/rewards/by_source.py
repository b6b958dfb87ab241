"""A reward for each data source: the rewards of a mix of tasks.

    reward: {name: by_source, sources: {maths: math, code: {name: code, language: python}, game: environment}}
    reward=by_source reward.sources.maths=math reward.sources.game=environment

Each reward runs on the executor that it would have alone. A data source without a reward is refused before the run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from etude.config import Choice
from etude.errors import ConfigError, DataError
from etude.records import Task
from etude.rewards.base import RewardFunction, Score, describe_task
from etude.rewards.combined import COMBINABLE_REWARDS, CombinedReward
from etude.rewards.constant import EnvironmentReward, NoReward

SOURCE_REWARDS: dict[str, type[RewardFunction]] = {
    **COMBINABLE_REWARDS,
    "combined": CombinedReward,
    "nothing": NoReward,
    "environment": EnvironmentReward,
}


class BySourceReward(RewardFunction):
    """The reward of each data source, by its name."""

    sources: Mapping[str, Annotated[RewardFunction, Choice(SOURCE_REWARDS)]] = Field(
        description="the reward of each data source, under its name in the data: `reward.sources.maths=math`"
    )

    @model_validator(mode="after")
    def _names_rewards(self) -> Self:
        if not self.sources:
            raise ConfigError(
                "`sources` names no reward. Give each data source one, such as `reward.sources.maths=math`."
            )
        return self

    @property
    def title(self) -> str:
        return f"by source ({', '.join(self.sources)})"

    @property
    def scores_answers(self) -> bool:
        return any(reward.scores_answers for reward in self.sources.values())

    def members(self) -> Mapping[str, RewardFunction]:
        return self.sources

    def with_members(self, members: Mapping[str, RewardFunction]) -> Self:
        return self.model_copy(update={"sources": members})

    def of_task(self, task: Task) -> RewardFunction:
        reward = self.sources.get(task.source)
        if reward is None:
            raise DataError(
                f"{describe_task(task)} has a data source without a reward: `reward.sources` has rewards for "
                f"{', '.join(self.sources)}."
            )
        return reward

    def check(self, task: Task) -> None:
        reward = self.sources.get(task.source)
        if reward is not None:  # a run refuses data with other sources, and does not leave their rows out
            reward.check(task)

    def __call__(self, task: Task, answer: str) -> Score | Awaitable[Score]:
        """Score an answer by the reward of its task's source. A judge runs each on its own executor instead."""
        return self.of_task(task)(task, answer)
