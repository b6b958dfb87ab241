"""`etude reward-model`: a model that scores answers, trained on pairs of preferred and rejected answers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.algorithms import Loss
from etude.algorithms.losses.preference import RewardModelLoss
from etude.config import Choice
from etude.data.preferences import PreferenceDataConfig
from etude.models import Head
from etude.recipes.supervised.config import SupervisedRun


class RewardModelRun(SupervisedRun):
    """All options of `etude reward-model`."""

    provided_columns: ClassVar[frozenset[str]] = frozenset({"reward"})
    outputs: ClassVar[frozenset[str]] = frozenset({"score"})
    head: ClassVar[Head] = "value"  # one number, which starts at 0 unless the model's files have a head

    recipe: Literal["reward-model"] = Field("reward-model", description="the command that these options are for")
    data: PreferenceDataConfig = Field(PreferenceDataConfig(), description="pairs of a preferred and a rejected answer")
    loss: Annotated[Loss, Choice({"reward_model": RewardModelLoss})] = Field(
        RewardModelLoss(), description="the loss that each step minimizes"
    )
