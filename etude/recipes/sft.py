"""`etude sft`: supervised fine-tuning. The model learns to say what it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.algorithms import Loss
from etude.algorithms.losses.supervised import SFT
from etude.config import Choice
from etude.data.demonstrations import Demonstrations
from etude.recipes.names import KNOWN_AS_EXAMPLES, OF_DEMONSTRATIONS
from etude.recipes.supervised import Supervised

__all__ = ["SFTRun"]


class SFTRun(Supervised):
    """Everything `etude sft` needs to know."""

    known_as: ClassVar[Mapping[str, str]] = KNOWN_AS_EXAMPLES | OF_DEMONSTRATIONS

    recipe: Literal["sft"] = Field("sft", description="the command that these options are for")
    data: Demonstrations = Field(Demonstrations(), description="what is shown")
    loss: Annotated[Loss, Choice({"sft": SFT})] = Field(SFT(), description="what each step minimises")
