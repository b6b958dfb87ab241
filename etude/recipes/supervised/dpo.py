"""`etude dpo`: direct preference optimization, from pairs of preferred and rejected answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.algorithms import Loss
from etude.algorithms.losses.preference import DPO
from etude.config import Choice
from etude.data.preferences import PreferenceDataConfig
from etude.recipes.recipe import Recipe, ReferenceConfig
from etude.recipes.run.option_aliases import DPO_ALIASES, SUPERVISED_ALIASES
from etude.recipes.supervised.config import SupervisedRun
from etude.train import TrainConfig


class DPORun(SupervisedRun):
    """All options of `etude dpo`."""

    aliases: ClassVar[Mapping[str, str]] = SUPERVISED_ALIASES | DPO_ALIASES
    path_options: ClassVar[dict[str, str]] = Recipe.path_options | {"reference": "reference.path"}
    provided_columns: ClassVar[frozenset[str]] = frozenset({"reward", "ref_logp"})

    recipe: Literal["dpo"] = Field("dpo", description="the command that these options are for")
    data: PreferenceDataConfig = Field(PreferenceDataConfig(), description="pairs of a preferred and a rejected answer")
    loss: Annotated[Loss, Choice({"dpo": DPO})] = Field(DPO(), description="the loss that each step minimizes")
    train: TrainConfig = Field(TrainConfig(), description="the optimizer and its precision")
    reference: ReferenceConfig = Field(
        ReferenceConfig(), description="the model that the policy is compared with and kept close to"
    )
