"""The options of `etude plan`: those of the planned command, and those of the hardware."""

from __future__ import annotations

from pydantic import Field

from etude.config import Config
from etude.recipes.run.config import Run
from etude.recipes.supervised.runs import DistillRun, DPORun, RewardModelRun, SFTRun


class PlanHardware(Config):
    """The hardware that a run is planned for."""

    ranks: int = Field(
        0, ge=0, description="training processes, as in the run; 0 is the most that the GPUs allow, or one on the CPU"
    )
    gpus: int | None = Field(
        None, ge=0, le=4096, description="GPUs to plan for; 0 plans for the CPU; null is the GPUs of this machine"
    )
    gpu_gib: float | None = Field(
        None, gt=0, description="GiB of memory of each GPU; null is the memory of this machine's GPUs"
    )
    gpu_tflops: float | None = Field(
        None, gt=0, description="10¹² operations per second of each GPU; null measures a GPU of this machine"
    )
    gpu_gbs: float | None = Field(
        None, gt=0, description="10⁹ bytes per second that each GPU reads; null measures a GPU of this machine"
    )
    expert_load: float = Field(
        1.25,
        ge=1,
        description="tokens of a rank's experts over an even share that must fit; larger plans for less even routers",
    )


class PlanRun(PlanHardware, Run):
    """The options of a plan for `etude train`."""


class PlanSFT(PlanHardware, SFTRun):
    """The options of a plan for `etude sft`."""


class PlanDPO(PlanHardware, DPORun):
    """The options of a plan for `etude dpo`."""


class PlanRewardModel(PlanHardware, RewardModelRun):
    """The options of a plan for `etude reward-model`."""


class PlanDistill(PlanHardware, DistillRun):
    """The options of a plan for `etude distill`."""
