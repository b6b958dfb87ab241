"""The options of a step's collection: which rollouts it trains on, and what their groups are compared by."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from etude.config import Config
from etude.errors import CollectionError

__all__ = ["CollectionConfig"]


class CollectionConfig(Config):
    """The rollouts that a step trains on."""

    tasks: int = Field(32, ge=1, description="tasks a step, each answered by a group")
    group_size: int = Field(8, ge=1, description="rollouts of a task, compared with each other")
    refill: int = Field(
        0,
        ge=0,
        description="replace groups in which all earned the same, with at most this many times `tasks` new ones; 0 "
        "keeps them",
    )
    metric: str = Field(
        "", description="the part of the reward that `refill` compares groups by, such as correct; empty is all of it"
    )
    retries: int = Field(1, ge=0, description="further attempts at a rollout that failed")
    timeout: float = Field(
        1800.0,
        gt=0,
        description="seconds to draw an answer in; neither its wait in line nor judging counts",
    )

    def group_metric(self, task: int, parts: Mapping[str, float], total: float, error: str) -> float:
        """What a rollout's group is compared by: one part of its reward, or all of it, also where a score stands for
        a judgement that failed (`error` says why) and has no such part."""
        if not self.metric or (error and self.metric not in parts):
            return total
        if self.metric not in parts:
            available = f"has the parts {', '.join(sorted(parts))}" if parts else "is one number, without named parts"
            raise CollectionError(
                f"`collect.metric={self.metric}` compares groups by that part of the reward, and the reward of an "
                f"answer to task {task} {available}. Name one of its parts, have the reward give that part, or leave "
                f"`collect.metric` out."
            )
        return parts[self.metric]
