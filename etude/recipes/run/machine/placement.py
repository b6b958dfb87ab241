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
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from etude.config import Config
from etude.config.together import problems_of, told_together
from etude.errors import ConfigError
from etude.lazy import torch
from etude.recipes.run.machine.device import select_device
from etude.rollout import ServerConfig

if TYPE_CHECKING:
    from etude.recipes.run.config import Run

DEVICE_PATTERN = r"^(policy|engine|cpu|cuda:\d+)$"
"""A role to share a device with, or a device."""
ROLES = {"reference": "the reference", "teacher": "the teacher", "critic": "the critic", "reward": "the reward model"}
"""The roles that can be placed, and their titles in messages."""


class PlacementConfig(Config):
    """The device of each model of a run: that of the `policy`, that of the `engine`, `cpu`, or a GPU as `cuda:3`."""

    layout: Literal["colocated", "split"] = Field(
        "colocated",
        description="colocated: the engine is on the policy's device, and `train.engine=local` shares the weights with "
        "it; split: it has its own of both",
    )
    reference: str = Field(
        "policy", pattern=DEVICE_PATTERN, description="device of the reference: policy, engine, cpu, cuda:K"
    )
    teacher: str = Field("policy", pattern=DEVICE_PATTERN, description="device of the teacher")
    critic: str = Field("policy", pattern=DEVICE_PATTERN, description="device of the critic")
    reward: str = Field(
        "policy", pattern=DEVICE_PATTERN, description="device of the reward model of `reward=reward_model`"
    )


def engine_device(run: Run) -> torch.device:
    """Return the device of this process's engine."""
    mine = select_device(run)
    if run.placement.layout == "colocated" or mine.type == "cpu":
        return mine
    return torch.device("cuda", run.ranks + (mine.index or 0))


def role_device(placement: PlacementConfig, role: str, *, policy: torch.device, engine: torch.device) -> torch.device:
    """Return the device of a role's model, in the process that has these devices for policy and engine."""
    where = str(getattr(placement, role))
    return {"policy": policy, "engine": engine}.get(where) or torch.device(where)


def gpus_of(run: Run) -> int:
    """Return the number of GPUs that a run needs, if it computes on GPUs."""
    named = [getattr(run.placement, role) for role in ROLES]
    num_named = max(
        (int(location.partition(":")[2]) + 1 for location in named if location.startswith("cuda:")), default=0
    )
    return max(run.ranks * (2 if run.placement.layout == "split" else 1), num_named)


def gpus_of_servers(run: Run, config: ServerConfig, *, learns: bool = True) -> tuple[int, ...]:
    """Return the GPUs of this machine that servers use, replica by replica, if the run computes on GPUs.

    learns: whether ranks of this run use GPUs too.
    """
    if config.url or config.devices:
        return config.devices
    first = run.ranks if learns and not run.train.offload else 0
    return tuple(range(first, first + config.replicas * config.tensor_parallel // config.nodes))


@told_together
def check_placement(run: Run, idle: frozenset[str], *, whole_distributions: bool) -> Iterator[ConfigError]:
    """Refuse a layout that does not fit this machine, or has no meaning.

    idle: the roles without a model in this run. whole_distributions: whether the reference is called in the middle of
    each policy update.
    """
    placement, device = run.placement, select_device(run)
    for role, title in ROLES.items():
        location = getattr(placement, role)
        if location != "policy" and role in idle:
            yield ConfigError(f"`placement.{role}={location}` places {title}, and this run has none. Leave it out.")
        elif location.startswith("cuda:") and device.type == "cpu":
            yield ConfigError(
                f"`placement.{role}={location}` is a GPU, and this run computes on the processor. Leave it out."
            )
    if whole_distributions and placement.reference != "policy":
        yield ConfigError(
            f"`placement.reference={placement.reference}`: this KL compares whole distributions in the middle of each "
            "update, so the reference must be where the policy is. Leave it out, or choose `kl=reverse`."
        )
    elif run.lora.rank and run.reference.path is None and placement.reference != "policy":
        yield ConfigError(
            f"`placement.reference={placement.reference}`: with `lora` the reference is the policy without its "
            "adapters, on the policy's device. Leave it out, or name another model with `reference.path`."
        )
    if isinstance(run.rollout, ServerConfig):
        yield from problems_of(check_placement_with_servers, placement)
        if run.rollout.devices and device.type == "cpu":
            yield ConfigError(
                "`rollout.devices` names GPUs for servers, and this run computes on the processor. Leave it out."
            )
    reward_on_device = "reward" not in idle and placement.reward != "cpu"
    if reward_on_device and device.type == "cuda" and not torch.cuda.is_available():
        yield ConfigError(
            "The reward model would compute on a GPU, as the ranks do. It runs in the controller's process, and that "
            "machine has no GPU: set `placement.reward=cpu`."
        )
    if placement.layout == "split" and run.train.offload:
        yield ConfigError(
            "`train.offload` has engine and optimizer take turns on one GPU, and with `placement.layout=split` each "
            "has its own. Leave one of them out."
        )
    if device.type == "cuda" and run.cluster == "ray":
        yield from problems_of(_refuse_other_gpus, placement)
        if isinstance(run.rollout, ServerConfig) and not (run.rollout.url or run.rollout.devices):
            yield ConfigError(
                "Over Ray this process does not know which GPUs the ranks have: name those for the servers of this "
                "machine with `rollout.devices`."
            )
    elif device.type == "cuda":
        yield from problems_of(_refuse_too_many, run, torch.cuda.device_count())
        if isinstance(run.rollout, ServerConfig):
            yield from problems_of(_refuse_weight_transport, run, run.rollout)


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


def _refuse_weight_transport(run: Run, config: ServerConfig) -> None:
    """Refuse `ipc` where a server is not on its rank's GPU, and `nccl` where it is. Servers are assigned to ranks in
    turn."""
    server_gpus, width = gpus_of_servers(run, config), config.tensor_parallel // config.nodes
    for server in range(len(server_gpus) // width):
        rank, gpus = server % run.ranks, server_gpus[server * width : (server + 1) * width]
        description = f"server {server} is on {' and '.join(map(str, gpus))} and gets weights from the rank on {rank}"
        if config.weight_transport == "ipc" and set(gpus) != {rank}:
            raise ConfigError(
                "`rollout.weight_transport=ipc` shares memory of the GPU that a rank and its servers are on; of "
                f"GPUs, {description}. Have them take turns with `train.offload`, name the ranks' with "
                "`rollout.devices`, or choose `rollout.weight_transport=shm` or `nccl`."
            )
        if config.weight_transport == "nccl" and rank in gpus:
            raise ConfigError(
                f"`rollout.weight_transport=nccl` goes from one GPU to another, and of GPUs, {description}. Choose "
                f"`rollout.weight_transport=ipc`, or name others with `rollout.devices`."
            )


def _refuse_other_gpus(placement: PlacementConfig) -> None:
    """Refuse options that name other GPUs than a rank's own: over Ray each rank sees no other."""
    named = [
        f"placement.{role}={location}" for role in ROLES if (location := getattr(placement, role)).startswith("cuda:")
    ]
    for option in [*["placement.layout=split"] * (placement.layout == "split"), *named]:
        raise ConfigError(
            f"`{option}` wants a second GPU, and over Ray each rank has one and sees no other. Leave it out, or run "
            "on one machine without `cluster=ray`."
        )


def _refuse_too_many(run: Run, num_gpus: int) -> None:
    """Refuse a layout that needs more GPUs than there are, and show the sum."""
    server_gpus = gpus_of_servers(run, run.rollout) if isinstance(run.rollout, ServerConfig) else ()
    required = max(gpus_of(run), max(server_gpus, default=-1) + 1)
    if required <= num_gpus:
        return
    parts = [f"`ranks={run.ranks}` that train on one each"]
    parts += [f"{run.ranks} more for their engines (`placement.layout=split`)"] * (run.placement.layout == "split")
    named = [
        f"`placement.{role}={location}`" for role in ROLES if (location := getattr(run.placement, role))[:4] == "cuda"
    ]
    parts += [f"GPU numbers from 0 up to that of {' and '.join(named)}"] if named else []
    remedy = "choose `placement.layout=colocated`, place models elsewhere"
    if server_gpus:
        assert isinstance(run.rollout, ServerConfig)
        parts.append(_describe_server_gpus(run.rollout, server_gpus))
        remedy = (
            "or `rollout.replicas`; have servers share GPUs with the ranks, by `rollout.devices` and "
            "`rollout.gpu_memory_utilization` or in turns by `train.offload`"
        )
    raise ConfigError(
        f"This layout wants {required} GPUs, and torch sees {num_gpus}: {', '.join(parts)}. Lower `ranks`, {remedy}, "
        "or make more GPUs visible."
    )


def _describe_server_gpus(config: ServerConfig, server_gpus: tuple[int, ...]) -> str:
    """Describe the GPUs that servers need, as a part of the sum."""
    gpu_range = f"GPU numbers up to {max(server_gpus)} for servers"
    if config.devices:
        return f"{gpu_range} (`rollout.devices`)"
    width = config.tensor_parallel // config.nodes
    return (
        f"{gpu_range}, {len(server_gpus)} from number {server_gpus[0]} on (`rollout.replicas={config.replicas}`, "
        f"{width} each)"
    )


def describe_placement(run: Run, roles: frozenset[str]) -> list[str]:
    """Return a line for each device of this process with the models on it. roles: the roles that have a model."""
    policy, engine = select_device(run), engine_device(run)
    split, sharded = run.placement.layout == "split", run.train.choose_engine(run.ranks) == "fsdp"
    served = isinstance(run.rollout, ServerConfig)
    weights = "a copy of all weights" if sharded else "the same weights"
    models_by_device = {
        str(policy): ["the policy" if split or served else f"the policy and its engine, with {weights}"]
    }
    if split:
        models_by_device.setdefault(str(engine), []).append("the engine, with its own weights")
    for role in (role for role in ROLES if role in roles):
        where = role_device(run.placement, role, policy=policy, engine=engine)
        models_by_device.setdefault(str(where), []).append(ROLES[role])
    ranks = f" On each of {run.ranks} ranks; these are the devices of rank 0." if run.ranks > 1 else ""
    turns = " Engine and optimizer take turns." if run.train.offload else ""
    lines = [f"On {device}: {', '.join(models)}.{turns}{ranks}" for device, models in models_by_device.items()]
    return [*lines, _describe_sampling(run, policy)] if served else lines


def _describe_sampling(run: Run, policy: torch.device) -> str:
    assert isinstance(run.rollout, ServerConfig)
    server_gpus = gpus_of_servers(run, run.rollout) if policy.type == "cuda" else ()
    gpu_names = f" on {', '.join(f'cuda:{gpu}' for gpu in server_gpus)}" if server_gpus else ""
    return f"Servers sample{gpu_names}, in separate processes."
