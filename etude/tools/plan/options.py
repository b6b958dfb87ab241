"""The options of `etude plan`: those of the command that the run is for, and what the run shall be on."""

from __future__ import annotations

from pydantic import Field

from etude.config import Config
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.supervised.distill import DistillRun
from etude.recipes.supervised.dpo import DPORun
from etude.recipes.supervised.reward_model import RewardModelRun
from etude.recipes.supervised.sft import SFTRun

__all__ = ["PLAN_CONFIGS", "PlanDPO", "PlanDistill", "PlanHardware", "PlanRewardModel", "PlanRun", "PlanSFT"]


class PlanHardware(Config):
    """What a run is planned for."""

    ranks: int = Field(
        0, ge=0, description="processes that share the work, as of the run; 0 is as many as there are GPUs for, or one"
    )
    gpus: int | None = Field(
        None, ge=0, le=4096, description="GPUs to plan for; 0 is the processor, null those that torch reaches here"
    )
    gpu_gib: float | None = Field(None, gt=0, description="GiB of memory that each has; null is what those here have")
    gpu_tflops: float | None = Field(
        None, gt=0, description="10¹² operations a second that each can do; null is measured where there is one"
    )
    gpu_gbs: float | None = Field(
        None, gt=0, description="10⁹ bytes a second that each can read; null is measured where there is one"
    )


class PlanRun(PlanHardware, Run):
    """A run of `etude train`, and what it is planned for."""


class PlanSFT(PlanHardware, SFTRun):
    """One of `etude sft`."""


class PlanDPO(PlanHardware, DPORun):
    """One of `etude dpo`."""


class PlanRewardModel(PlanHardware, RewardModelRun):
    """One of `etude reward-model`."""


class PlanDistill(PlanHardware, DistillRun):
    """One of `etude distill`."""


PLAN_CONFIGS: dict[str, type[Recipe]] = {
    "": PlanRun,
    "sft": PlanSFT,
    "dpo": PlanDPO,
    "reward-model": PlanRewardModel,
    "distill": PlanDistill,
}
"""What can be planned: a run of `etude train`, and by their commands those that learn from examples."""
