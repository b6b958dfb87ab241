"""`etude distill`: a smaller model learns what a larger one thinks at each token of given texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.algorithms import Loss
from etude.algorithms.losses.distill import TopKDistillation
from etude.config import Choice
from etude.data.demonstrations import Demonstrations
from etude.recipes.names import KNOWN_AS_EXAMPLES, OF_DISTILLATION
from etude.recipes.recipe import Recipe, Teacher
from etude.recipes.supervised import Supervised

__all__ = ["DistillRun", "Tutor"]


class Tutor(Teacher):
    """Whose thoughts are learned, and how much of them."""

    top: int = Field(64, ge=1, description="how many of its likeliest tokens it tells; the others count as one")


class DistillRun(Supervised):
    """Everything `etude distill` needs to know."""

    known_as: ClassVar[Mapping[str, str]] = KNOWN_AS_EXAMPLES | OF_DISTILLATION
    places: ClassVar[dict[str, str]] = Recipe.places | {"teacher": "teacher.path"}
    told: ClassVar[frozenset[str]] = frozenset({"teacher_topk_ids", "teacher_topk_logp"})
    outputs: ClassVar[frozenset[str]] = frozenset({"logp", "entropy", "topk_logp"})

    recipe: Literal["distill"] = Field("distill", description="the command that these options are for")
    data: Demonstrations = Field(Demonstrations(), description="the texts that both read")
    loss: Annotated[Loss, Choice({"distill_topk": TopKDistillation})] = Field(
        TopKDistillation(), description="what each step minimises"
    )
    teacher: Tutor = Field(Tutor(), description="the model that it learns from")
    temperature: float = Field(1.0, gt=0, description="what the logits of both are divided by before they are compared")
