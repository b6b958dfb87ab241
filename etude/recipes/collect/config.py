"""The options of a step's collection: the number of its rollouts, and the number that groups are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from etude.config import Config
from etude.config.only_with import OnlyWith
from etude.config.resume_marks import MAY_CHANGE
from etude.errors import CollectionError, ConfigError

DEFAULT_WINDOW = 2
"""The steps whose groups are in the default `window`."""


class CollectionConfig(Config):
    """The rollouts that a step trains on."""

    tasks: int = Field(32, ge=1, description="tasks per step, each answered by a group; more make a larger batch")
    group_size: int = Field(
        8,
        ge=1,
        description="rollouts per task, compared with each other; larger gives a better baseline and needs more "
        "sampling",
    )
    refill: int = Field(
        0,
        ge=0,
        description="replace groups with equal rewards, by at most this many times `tasks` new ones; 0 keeps them",
    )
    metric: Annotated[
        str,
        OnlyWith(
            "collect.refill",
            bool,
            "says what `collect.refill` compares groups by, and `collect.refill=0` replaces none. Set `collect.refill` "
            "(10 is usual), or leave `collect.metric` out.",
        ),
    ] = Field(
        "", description="reward part that `refill` compares groups by, such as correct; empty is the whole reward"
    )
    order: Annotated[Literal["ordinal", "windowed"], MAY_CHANGE] = Field(
        "ordinal",
        description="groups that a step trains on; `ordinal`: the next ones in the order of tasks; `windowed`: those "
        "that end first, as long as no other gets too old. Needs `max_staleness` from 2 on",
    )
    window: Annotated[int | None, MAY_CHANGE] = Field(
        None,
        ge=2,
        description="for `order=windowed`: most groups that are sampled or wait for a step; more let steps wait less "
        "for slow ones and make rollouts older; null is 2 x `tasks`",
    )
    retries: int = Field(1, ge=0, description="further attempts at a rollout that failed; 0 does not retry")
    timeout: Annotated[
        float,
        MAY_CHANGE,
        OnlyWith(
            "has_agents",
            lambda has_agents: not has_agents,
            "does nothing where an agent plays: `agent.timeout` bounds an attempt, with all its calls. Leave it out.",
        ),
    ] = Field(
        1800.0,
        gt=0,
        description="seconds to sample an answer in; neither its wait in the queue nor judging counts",
    )

    @property
    def candidates(self) -> int | None:
        """The most groups that are sampled or wait for a step; None in the order of tasks."""
        if self.order == "ordinal":
            return None
        return self.window or DEFAULT_WINDOW * self.tasks

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.window is not None and self.order == "ordinal":
            raise ConfigError(
                "`collect.window` is for `collect.order=windowed`, and steps take the tasks in their order. Leave it "
                "out, or set `collect.order=windowed`."
            )
        if self.window is not None and self.window <= self.tasks:
            raise ConfigError(
                f"`collect.window={self.window}` leaves a step of `collect.tasks={self.tasks}` no choice. Give more "
                f"than {self.tasks}, or leave it out."
            )
        return self

    def group_metric(self, task: int, parts: Mapping[str, float], total: float, error: str) -> float:
        """Return the number that a rollout's group is compared by: one part of its reward, or all of it.

        It is the whole reward too where an error score replaces a failed judgement (`error` is its cause) and has no
        such part.
        """
        if not self.metric or (error and self.metric not in parts):
            return total
        if self.metric not in parts:
            available = f"has the parts {', '.join(sorted(parts))}" if parts else "is one number, without named parts"
            raise CollectionError(
                f"`collect.metric={self.metric}` compares groups by that part of the reward, and the reward of an "
                f"answer to task {task} {available}. Name one of its parts, have the reward give that part, or leave "
                "`collect.metric` out."
            )
        return parts[self.metric]
