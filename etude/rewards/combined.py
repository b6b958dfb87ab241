"""A weighted sum of several rewards, each of which is a named part.

    reward: {name: combined, parts: {right: math, form: {name: format, tags: [think, answer]}}, weights: {form: 0.2}}
    reward=combined reward.parts.right=math reward.parts.form=format reward.weights.form=0.2

Every part runs on the executor that it would have alone: in place, awaited, on a thread or in worker processes. All
parts of an answer run at the same time. If one part fails, there is no reward, and the verdict names that part.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from etude.config import Choice
from etude.errors import ConfigError
from etude.records import Task
from etude.rewards.base import RewardFunction, parse_score
from etude.rewards.countdown import Countdown
from etude.rewards.function import FunctionReward
from etude.rewards.gsm8k import Gsm8k
from etude.rewards.instructions import Instructions
from etude.rewards.maths import Math
from etude.rewards.model_judge import ModelJudge
from etude.rewards.multiple_choice import MultipleChoice
from etude.rewards.reward_model import RewardModelScore
from etude.rewards.sandbox import Code
from etude.rewards.text import F1, ExactMatch, Format, Regex

COMBINABLE_REWARDS: dict[str, type[RewardFunction]] = {
    "exact_match": ExactMatch,
    "regex": Regex,
    "f1": F1,
    "format": Format,
    "multiple_choice": MultipleChoice,
    "gsm8k": Gsm8k,
    "math": Math,
    "countdown": Countdown,
    "instructions": Instructions,
    "code": Code,
    "judge": ModelJudge,
    "reward_model": RewardModelScore,
    "function": FunctionReward,
}


class CombinedReward(RewardFunction):
    """The weighted sum of several rewards, whose weighted scores are its named parts."""

    parts: Mapping[str, Annotated[RewardFunction, Choice(COMBINABLE_REWARDS)]] = Field(
        description="rewards, each under a name of yours: `reward.parts.right=math`"
    )
    weights: Mapping[str, float] = Field(
        default_factory=dict,
        description="factor of each part's score, by the part's name, 1 by default; larger counts more, negative "
        "penalizes",
    )

    @model_validator(mode="after")
    def _weights_are_of_parts(self) -> Self:
        if not self.parts:
            raise ConfigError("`parts` names no reward. Give at least one, such as `reward.parts.right=math`.")
        for name in self.parts:
            if not name.strip() or name == "score" or "/" in name:
                raise ConfigError(
                    f"`parts` has a part called '{name}', which is empty, is `score`, or has a '/'. Use another name."
                )
        for name, weight in self.weights.items():
            if name not in self.parts:
                raise ConfigError(
                    f"`weights` has one for '{name}', and the parts are {', '.join(self.parts)}. Name one of those, or "
                    f"leave the weight out."
                )
            if not math.isfinite(weight) or weight == 0:
                raise ConfigError(
                    f"The weight of the part '{name}' is {weight:g}, and a weight is a finite number other than 0. "
                    f"Give another number, or leave the part out."
                )
        return self

    @property
    def title(self) -> str:
        return f"combined ({', '.join(self.parts)})"

    def apply_weight(self, name: str, score: float) -> float:
        """Return the score of a part times its weight."""
        return self.weights.get(name, 1.0) * score

    def members(self) -> Mapping[str, RewardFunction]:
        return self.parts

    def with_members(self, members: Mapping[str, RewardFunction]) -> Self:
        return self.model_copy(update={"parts": members})

    def check(self, task: Task) -> None:
        for part in self.parts.values():
            part.check(task)

    async def __call__(self, task: Task, answer: str) -> dict[str, float]:
        """Return the weighted parts, computed one after the other. A judge runs each on its own executor instead."""
        weighted = {}
        for name, part in self.parts.items():
            result = part(task, answer)
            weighted[name] = self.apply_weight(
                name, parse_score(await result if inspect.isawaitable(result) else result)[0]
            )
        return weighted

    def extract(self, answer: str) -> str | None:
        """Return the answer that the first part which extracts one reads in the text."""
        return next(
            (extracted for part in self.parts.values() if (extracted := part.extract(answer)) is not None), None
        )
