"""`etude distill`: a smaller model learns what a larger one thinks at each token of given texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.algorithms import Loss
from etude.algorithms.losses.distill import TopKDistillation
from etude.config import Choice
from etude.data.demonstrations import DemonstrationDataConfig
from etude.recipes.recipe import Recipe, TeacherConfig
from etude.recipes.run.option_aliases import DISTILLATION_ALIASES, SUPERVISED_ALIASES
from etude.recipes.supervised.config import SupervisedRun

__all__ = ["DistillRun", "DistillTeacherConfig"]


class DistillTeacherConfig(TeacherConfig):
    """Whose thoughts are learned, and how much of them."""

    top: int = Field(64, ge=1, description="how many of its likeliest tokens it tells; the others count as one")


class DistillRun(SupervisedRun):
    """Everything `etude distill` needs to know."""

    aliases: ClassVar[Mapping[str, str]] = SUPERVISED_ALIASES | DISTILLATION_ALIASES
    path_options: ClassVar[dict[str, str]] = Recipe.path_options | {"teacher": "teacher.path"}
    provided_columns: ClassVar[frozenset[str]] = frozenset({"teacher_topk_ids", "teacher_topk_logp"})
    outputs: ClassVar[frozenset[str]] = frozenset({"logp", "entropy", "topk_logp"})

    recipe: Literal["distill"] = Field("distill", description="the command that these options are for")
    data: DemonstrationDataConfig = Field(DemonstrationDataConfig(), description="the texts that both read")
    loss: Annotated[Loss, Choice({"distill_topk": TopKDistillation})] = Field(
        TopKDistillation(), description="what each step minimises"
    )
    teacher: DistillTeacherConfig = Field(DistillTeacherConfig(), description="the model that it learns from")
    temperature: float = Field(1.0, gt=0, description="what the logits of both are divided by before they are compared")
