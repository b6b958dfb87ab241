"""The options of the four supervised commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.algorithms import Loss
from etude.algorithms.losses.distill import TopKDistillation
from etude.algorithms.losses.preference import DPO, RewardModelLoss
from etude.algorithms.losses.supervised import SFT
from etude.config import Choice
from etude.data.demonstrations import DemonstrationDataConfig
from etude.data.preferences import PreferenceDataConfig
from etude.models import Head
from etude.recipes.option_names.aliases import (
    DEMONSTRATION_ALIASES,
    DISTILLATION_ALIASES,
    DPO_ALIASES,
    SUPERVISED_ALIASES,
)
from etude.recipes.recipe import Recipe, ReferenceConfig, TeacherConfig
from etude.recipes.supervised.config import SupervisedRun
from etude.train import TrainConfig


class SFTRun(SupervisedRun):
    """All options of `etude sft`: supervised fine-tuning on demonstrations."""

    aliases: ClassVar[Mapping[str, str]] = SUPERVISED_ALIASES | DEMONSTRATION_ALIASES

    recipe: Literal["sft"] = Field("sft", description="the command that these options are for")
    data: DemonstrationDataConfig = Field(DemonstrationDataConfig(), description="the demonstrations")
    loss: Annotated[Loss, Choice({"sft": SFT})] = Field(SFT(), description="the loss that each step minimizes")


class DPORun(SupervisedRun):
    """All options of `etude dpo`: direct preference optimization, from pairs of preferred and rejected answers."""

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


class RewardModelRun(SupervisedRun):
    """All options of `etude reward-model`: a model that scores answers, trained on pairs of them."""

    provided_columns: ClassVar[frozenset[str]] = frozenset({"reward"})
    outputs: ClassVar[frozenset[str]] = frozenset({"score"})
    head: ClassVar[Head] = "value"  # one number, which starts at 0 unless the model's files have a head

    recipe: Literal["reward-model"] = Field("reward-model", description="the command that these options are for")
    data: PreferenceDataConfig = Field(PreferenceDataConfig(), description="pairs of a preferred and a rejected answer")
    loss: Annotated[Loss, Choice({"reward_model": RewardModelLoss})] = Field(
        RewardModelLoss(), description="the loss that each step minimizes"
    )


class DistillTeacherConfig(TeacherConfig):
    """The teacher model, and how much of its distribution is learned."""

    top: int = Field(
        64,
        ge=1,
        description="most likely tokens that the teacher gives per position; larger is more exact and needs more "
        "memory; all others count as one",
    )


class DistillRun(SupervisedRun):
    """All options of `etude distill`: a model learns a larger one's distribution at each token of given texts."""

    aliases: ClassVar[Mapping[str, str]] = SUPERVISED_ALIASES | DISTILLATION_ALIASES
    path_options: ClassVar[dict[str, str]] = Recipe.path_options | {"teacher": "teacher.path"}
    path_mappings: ClassVar[dict[str, str]] = {"teacher": "teacher.paths"}
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
