"""`etude sft`: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.algorithms import Loss
from etude.algorithms.losses.supervised import SFT
from etude.config import Choice
from etude.data.demonstrations import DemonstrationDataConfig
from etude.recipes.run.option_aliases import DEMONSTRATION_ALIASES, SUPERVISED_ALIASES
from etude.recipes.supervised.config import SupervisedRun


class SFTRun(SupervisedRun):
    """All options of `etude sft`."""

    aliases: ClassVar[Mapping[str, str]] = SUPERVISED_ALIASES | DEMONSTRATION_ALIASES

    recipe: Literal["sft"] = Field("sft", description="the command that these options are for")
    data: DemonstrationDataConfig = Field(DemonstrationDataConfig(), description="the demonstrations")
    loss: Annotated[Loss, Choice({"sft": SFT})] = Field(SFT(), description="the loss that each step minimizes")
