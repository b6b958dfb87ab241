"""`etude distill`: a smaller model learns a larger one's distribution at each token of given texts."""

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


class DistillTeacherConfig(TeacherConfig):
    """The teacher model, and how much of its distribution is learned."""

    top: int = Field(
        64,
        ge=1,
        description="most likely tokens that the teacher gives per position; larger is more exact and needs more "
        "memory; all others count as one",
    )


class DistillRun(SupervisedRun):
    """All options of `etude distill`."""

    aliases: ClassVar[Mapping[str, str]] = SUPERVISED_ALIASES | DISTILLATION_ALIASES
    path_options: ClassVar[dict[str, str]] = Recipe.path_options | {"teacher": "teacher.path"}
    provided_columns: ClassVar[frozenset[str]] = frozenset({"teacher_topk_ids", "teacher_topk_logp"})
    outputs: ClassVar[frozenset[str]] = frozenset({"logp", "entropy", "topk_logp"})

    recipe: Literal["distill"] = Field("distill", description="the command that these options are for")
    data: DemonstrationDataConfig = Field(DemonstrationDataConfig(), description="the texts that both models read")
    loss: Annotated[Loss, Choice({"distill_topk": TopKDistillation})] = Field(
        TopKDistillation(), description="the loss that each step minimizes"
    )
    teacher: DistillTeacherConfig = Field(DistillTeacherConfig(), description="the model to train on")
    temperature: float = Field(
        1.0,
        gt=0,
        description="divisor of both models' logits before they are compared; larger gives unlikely tokens more weight",
    )
