"""Refuses a layout that does not fit the machine, or has no meaning."""

from __future__ import annotations

from collections.abc import Iterator

from etude.config.together import problems_of, told_together
from etude.errors import ConfigError
from etude.lazy import torch
from etude.recipes.run.config import Run
from etude.recipes.run.machine.placement import (
    ROLES,
    PlacementConfig,
    check_placement_with_servers,
    gpus_of,
    gpus_of_servers,
)
from etude.rollout import ServerConfig


@told_together
def check_placement(run: Run) -> Iterator[ConfigError]:
    """Refuse a layout that does not fit this machine, or has no meaning."""
    placement = run.placement
    device = run.compute_device()
    for role in ROLES:
        location = getattr(placement, role)
        if location.startswith("cuda:") and device.type == "cpu":
            yield ConfigError(
                f"`placement.{role}={location}` is a GPU, and this run computes on the processor. Leave it out."
            )
    if "full_kl" in run.forward_outputs() and placement.reference != "policy":
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
    reward_on_device = run.uses_reward_model and placement.reward != "cpu"
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
            yield from problems_of(
                _refuse_weight_transport, run.rollout, run.ranks, gpus_of_servers(run.rollout, run.own_gpus)
            )


def _refuse_weight_transport(config: ServerConfig, ranks: int, server_gpus: tuple[int, ...]) -> None:
    """Refuse `ipc` where a server is not on its rank's GPU, and `nccl` where it is. Servers are assigned to ranks in
    turn."""
    width = config.tensor_parallel // config.nodes
    for server in range(len(server_gpus) // width):
        rank, gpus = server % ranks, server_gpus[server * width : (server + 1) * width]
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
    server_gpus = gpus_of_servers(run.rollout, run.own_gpus) if isinstance(run.rollout, ServerConfig) else ()
    required = max(gpus_of(run.placement, run.ranks), max(server_gpus, default=-1) + 1)
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
