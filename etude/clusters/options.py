"""The options of `etude launch`: those of the launched command, and those of its job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from etude.config import Config
from etude.recipes.run.config import Run
from etude.recipes.supervised.runs import DistillRun, DPORun, RewardModelRun, SFTRun


class JobConfig(Config):
    """The job of a cluster in which a run computes."""

    nodes: int = Field(1, ge=1, description="machines; several need `cluster=ray`, which the job starts on all of them")
    gpus: int = Field(0, ge=0, description="GPUs of each machine")
    cpus: int = Field(8, ge=1, description="processor cores of each machine")
    memory_gib: int | None = Field(
        None, ge=1, description="GiB of memory of each machine; null is the cluster's default"
    )
    minutes: int | None = Field(
        None, ge=5, description="limit of one job, which then saves and is queued again; null is the cluster's default"
    )
    partition: str | None = Field(None, description="partition, or queue; null is the cluster's default")
    account: str | None = Field(None, description="account that pays; null is the user's default")
    setup: tuple[str, ...] = Field((), description="lines of shell before the run, such as `module load cuda`")
    more: tuple[str, ...] = Field((), description="further options of sbatch, such as `--qos=high`")


class LaunchOptions(Config):
    """The options that `etude launch` adds to a run."""

    sections_elsewhere: ClassVar[Mapping[str, str]] = {}

    launch: JobConfig = JobConfig()


class LaunchRun(LaunchOptions, Run):
    """The options of a launched `etude train`."""


class LaunchSFT(LaunchOptions, SFTRun):
    """The options of a launched `etude sft`."""


class LaunchDPO(LaunchOptions, DPORun):
    """The options of a launched `etude dpo`."""


class LaunchRewardModel(LaunchOptions, RewardModelRun):
    """The options of a launched `etude reward-model`."""


class LaunchDistill(LaunchOptions, DistillRun):
    """The options of a launched `etude distill`."""
