"""`etude dpo`: direct preference optimisation. The model comes to prefer what people preferred."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.algorithms import Loss
from etude.algorithms.losses.pairs import DPO
from etude.config import Choice
from etude.data.preferences import Preferences
from etude.recipes.names import KNOWN_AS_EXAMPLES, OF_DPO
from etude.recipes.recipe import Recipe, Reference
from etude.recipes.supervised import Supervised
from etude.train import Train

__all__ = ["DPORun"]


class DPORun(Supervised):
    """Everything `etude dpo` needs to know."""

    known_as: ClassVar[Mapping[str, str]] = KNOWN_AS_EXAMPLES | OF_DPO
    places: ClassVar[dict[str, str]] = Recipe.places | {"reference": "reference.path"}
    told: ClassVar[frozenset[str]] = frozenset({"reward", "ref_logp"})

    recipe: Literal["dpo"] = Field("dpo", description="the command that these options are for")
    data: Preferences = Field(Preferences(), description="what was preferred to what")
    loss: Annotated[Loss, Choice({"dpo": DPO})] = Field(DPO(), description="what each step minimises")
    train: Train = Field(Train(), description="the optimizer and its precision")
    reference: Reference = Field(Reference(), description="the model that it is compared with and held to")
