"""`etude reward-model`: a model that scores answers as people would, learned from what they preferred."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.algorithms import Loss
from etude.algorithms.losses.preference import RewardModelLoss
from etude.config import Choice
from etude.data.preferences import PreferenceDataConfig
from etude.models import Head
from etude.recipes.supervised.config import SupervisedRun

__all__ = ["RewardModelRun"]


class RewardModelRun(SupervisedRun):
    """Everything `etude reward-model` needs to know."""

    provided_columns: ClassVar[frozenset[str]] = frozenset({"reward"})
    outputs: ClassVar[frozenset[str]] = frozenset({"score"})
    head: ClassVar[Head] = "value"  # one number, which begins at 0 unless the model's files have it

    recipe: Literal["reward-model"] = Field("reward-model", description="the command that these options are for")
    data: PreferenceDataConfig = Field(PreferenceDataConfig(), description="what was preferred to what")
    loss: Annotated[Loss, Choice({"reward_model": RewardModelLoss})] = Field(
        RewardModelLoss(), description="what each step minimises"
    )
