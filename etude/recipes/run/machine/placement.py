"""The device of each model of a run: shared with another model, or its own.

    colocated    the engine samples from the policy's own weights, in the same memory; beside sharded weights it has
                 a whole copy. With `train.offload` they take turns on a GPU: the engine sleeps while the policy
                 trains. The optimizer is offloaded while the engine samples
    split        the engine has its own weights, on its own GPU, which each publishing updates; on the CPU, in its
                 own memory

Rank k computes on GPU k; with `split`, its engine samples on GPU ranks + k. Servers use the GPUs after those of the
ranks, unless others are named. With `train.offload`, where they take turns, they use the same GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from etude.config import Config
from etude.config.only_with import OnlyWith
from etude.config.resume_marks import MAY_CHANGE
from etude.config.together import told_together
from etude.errors import ConfigError
from etude.lazy import torch
from etude.rollout import ServerConfig

DEVICE_PATTERN = r"^(policy|engine|cpu|cuda:\d+)$"
"""A role to share a device with, or a device."""
ROLES = {"reference": "the reference", "teacher": "the teacher", "critic": "the critic", "reward": "the reward model"}
"""The roles that can be placed, and their titles in messages."""


class PlacementConfig(Config):
    """The device of each model of a run: that of the `policy`, that of the `engine`, `cpu`, or a GPU as `cuda:3`."""

    layout: Annotated[Literal["colocated", "split"], MAY_CHANGE] = Field(
        "colocated",
        description="colocated: the engine is on the policy's device, and `train.engine=local` shares the weights with "
        "it; split: it has its own of both",
    )
    reference: Annotated[
        str,
        MAY_CHANGE,
        OnlyWith("uses_reference", bool, "places the reference, and this run has none. Leave it out."),
    ] = Field("policy", pattern=DEVICE_PATTERN, description="device of the reference: policy, engine, cpu, cuda:K")
    teacher: Annotated[
        str, MAY_CHANGE, OnlyWith("uses_teacher", bool, "places the teacher, and this run has none. Leave it out.")
    ] = Field("policy", pattern=DEVICE_PATTERN, description="device of the teacher")
    critic: Annotated[
        str, MAY_CHANGE, OnlyWith("uses_critic", bool, "places the critic, and this run has none. Leave it out.")
    ] = Field("policy", pattern=DEVICE_PATTERN, description="device of the critic")
    reward: Annotated[
        str,
        MAY_CHANGE,
        OnlyWith("uses_reward_model", bool, "places the reward model, and this run has none. Leave it out."),
    ] = Field("policy", pattern=DEVICE_PATTERN, description="device of the reward model of `reward=reward_model`")


def engine_device(placement: PlacementConfig, *, policy: torch.device, ranks: int) -> torch.device:
    """Return the device of the engine of a process whose policy is on this device."""
    if placement.layout == "colocated" or policy.type == "cpu":
        return policy
    return torch.device("cuda", ranks + (policy.index or 0))


def role_device(placement: PlacementConfig, role: str, *, policy: torch.device, engine: torch.device) -> torch.device:
    """Return the device of a role's model, in the process that has these devices for policy and engine."""
    where = str(getattr(placement, role))
    return {"policy": policy, "engine": engine}.get(where) or torch.device(where)


def gpus_of(placement: PlacementConfig, ranks: int) -> int:
    """Return the number of GPUs that the ranks of a run need, if it computes on GPUs."""
    named = [getattr(placement, role) for role in ROLES]
    num_named = max(
        (int(location.partition(":")[2]) + 1 for location in named if location.startswith("cuda:")), default=0
    )
    return max(ranks * (2 if placement.layout == "split" else 1), num_named)


def gpus_of_servers(config: ServerConfig, taken: int) -> tuple[int, ...]:
    """Return the GPUs of this machine that servers use, replica by replica, if the run computes on GPUs.

    taken: the GPUs that ranks have for themselves; none where servers and ranks take turns.
    """
    if config.url or config.devices:
        return config.devices
    return tuple(range(taken, taken + config.replicas * config.tensor_parallel // config.nodes))


@told_together
def check_placement_with_servers(placement: PlacementConfig) -> Iterator[ConfigError]:
    """Refuse placement options of the embedded engine where servers sample."""
    if placement.layout == "split":
        yield ConfigError(
            "`placement.layout=split` gives the embedded engine its own GPU, and here servers sample, which have "
            "their own: `rollout.devices` names them. Leave it out."
        )
    for role, title in ROLES.items():
        if getattr(placement, role) == "engine":
            yield ConfigError(
                f"`placement.{role}=engine` puts {title} on the device of the embedded engine, and here servers "
                "sample. Name a device, such as cpu or cuda:1."
            )
