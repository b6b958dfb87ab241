"""What servers hold that sample for a run: known by their options, because nothing of theirs can be rehearsed here.

    weights             the model's, in its precision; of each layer, one part for each rank along `tensor_parallel`
    keys and values     `rollout.kv_gib`, or what is left of the share of memory that a server takes

What their kernels want meanwhile, activations and CUDA graphs, is not known, and that is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.models import Model
from etude.recipes.run.config import Run
from etude.recipes.run.placement import gpus_of_servers
from etude.rollout import ServerConfig
from etude.tools.plan.memory_tracker import PeakMemory
from etude.tools.plan.results import GIB, DeviceMemory

__all__ = ["add_servers", "default_memory_share", "gpus_needed", "notes", "ranks_by_gpu", "server_options"]


@dataclass(frozen=True)
class ServerMemoryPolicy:
    """How servers of a kind take memory."""

    share: float | None
    """Of a device's, unless they are told; None where each finds out for itself."""
    share_of_free: bool
    """Whether the share is of what is free as one starts, and not of all."""
    share_covers_graphs: bool
    """Whether activations and CUDA graphs are taken from the share."""
    kv_per_replica: bool
    """Whether `rollout.kv_gib` is what the ranks of a replica hold together, and not each."""


MEMORY_POLICIES = {
    "vLLM": ServerMemoryPolicy(0.92, share_of_free=False, share_covers_graphs=True, kv_per_replica=False),
    "SGLang": ServerMemoryPolicy(None, share_of_free=True, share_covers_graphs=False, kv_per_replica=True),
}
"""Of the supported versions, as their sources have it."""


@dataclass(frozen=True)
class ServerMemory:
    """What one rank of a server holds."""

    weights: int
    kv: int
    tokens: int
    """How many have their keys and values there, in the server as a whole."""

    def peak(self, count: int, name: str) -> PeakMemory:
        """Of so many; its weights are known by this name."""
        kinds = {name: count * self.weights, "kv": count * self.kv}
        return PeakMemory(sum(kinds.values()), kinds)


def server_options(run: Run) -> ServerConfig | None:
    """The options of the servers that sample, where such do, with the GPUs that they would have."""
    if not isinstance(run.rollout, ServerConfig):
        return None
    return run.rollout.model_copy(update={"devices": gpus_of_servers(run, run.rollout)})


def default_memory_share(config: ServerConfig) -> float | None:
    """The share of a device's memory that they take unless they are told; None where that is not known."""
    policy = MEMORY_POLICIES.get(config.create_backend().package)
    return None if policy is None else policy.share


def ranks_by_gpu(config: ServerConfig) -> Counter[int]:
    """The GPUs of this machine that servers compute on, and how many ranks of theirs each has."""
    return Counter(config.devices)


def gpus_needed(config: ServerConfig) -> int:
    """How many GPUs there have to be for them."""
    return max(ranks_by_gpu(config), default=-1) + 1


def add_servers(
    run: Run, config: ServerConfig, hosts: Mapping[torch.device, DeviceMemory], model: Model, limit: int | None
) -> tuple[tuple[DeviceMemory, ...], int]:
    """The devices of a run with what servers hold there, that on which the policy learns first; and how many tokens one
    server has keys and values of."""
    (device, training), *others = hosts.items()
    if config.url:
        return tuple(hosts.values()), 0
    if device.type == "cpu":
        memory = _server_memory(config, model, "cpu", limit, 0)
        return (_add_server(training, memory, config.replicas * config.tensor_parallel, sleeps=False),), memory.tokens
    ranks_on, devices, tokens = ranks_by_gpu(config), [], list[int]()
    used = training.phases["sampling"].total
    for count, gpus in sorted(Counter(ranks_on[gpu] for gpu in range(run.ranks)).items(), reverse=True):
        if not count:
            devices.append(replace(training, count=gpus))
            continue
        memory = _server_memory(config, model, "cuda", limit, used)
        name = "each GPU that trains and serves"
        devices.append(replace(_add_server(training, memory, count, sleeps=run.train.offload), name=name, count=gpus))
        tokens.append(memory.tokens)
    free = {gpu: count for gpu, count in ranks_on.items() if gpu >= run.ranks}
    for target, planned in others:
        count = free.pop(target.index or 0, 0)
        memory = _server_memory(config, model, "cuda", limit, planned.total) if count else ServerMemory(0, 0, 0)
        devices.append(_add_server(planned, memory, count, sleeps=run.train.offload) if count else planned)
        tokens += [memory.tokens] if count else []
    remote = (config.nodes - 1) * config.tensor_parallel // config.nodes
    for count, gpus in sorted((Counter(free.values()) + Counter({1: remote})).items()):
        memory = _server_memory(config, model, "cuda", limit, 0)
        devices.append(DeviceMemory("each GPU that serves", gpus, {"sampling": memory.peak(count, "weights")}, limit))
        tokens.append(memory.tokens)
    return tuple(devices), min(tokens)


def notes(config: ServerConfig, device: torch.device) -> tuple[str, ...]:
    """What is not known of them."""
    if config.url:
        return (f"What the servers at {', '.join(config.url)} hold is not known here.",)
    package = config.create_backend().package
    graphs = "activations and CUDA graphs" if device.type == "cuda" else "activations"
    if MEMORY_POLICIES[package].share_covers_graphs and config.kv_gib is None:
        return (
            f"{package} takes its share as it starts, and what it finds that {graphs} want is taken from keys and "
            f"values: how much that is, is not rehearsed, and so many tokens fewer are held.",
        )
    return (f"What {package} wants for {graphs} comes to that, and is not rehearsed: leave it some GiB.",)


def _add_server(planned: DeviceMemory, memory: ServerMemory, count: int, *, sleeps: bool) -> DeviceMemory:
    """A device with so many ranks of servers. They start when all else is loaded, and may sleep while it works."""
    server_peak, phases = memory.peak(count, "server"), {}
    for phase, peak in planned.phases.items():
        loaded = phase == "sampling" or not (sleeps or phase == "loading")
        phases[phase] = (
            PeakMemory(peak.total + server_peak.total, {**peak.kinds, **server_peak.kinds}) if loaded else peak
        )
    return replace(planned, phases=phases if "sampling" in phases else {"sampling": server_peak, **phases})


def _server_memory(config: ServerConfig, model: Model, device: str, limit: int | None, used: int) -> ServerMemory:
    """What one rank holds on a device of so many bytes, of which others hold some as it starts."""
    package, ranks = config.create_backend().package, config.tensor_parallel
    if package not in MEMORY_POLICIES:
        raise ConfigError(
            f"How {package} takes memory is not known, so no plan can be made of it. Start it by itself, and plan the "
            f"rest with its `rollout.url=…`."
        )
    policy = MEMORY_POLICIES[package]
    named_weights = (item for item in model.named_weights() if ".lora_" not in item[0])
    weights = int(sum(_bytes_per_rank(name, weight, model, ranks) for name, weight in named_weights))
    if config.needs_untied_head(device) and model.head_weight is model.module.get_input_embeddings().weight:
        weights += model.head_weight.nbytes // ranks
    token_bytes = (
        2 * model.num_layers * model.head_dim * model.dtype.itemsize * (model.kv_heads / min(ranks, model.kv_heads))
    )
    if config.kv_gib is not None:
        kv = int(config.kv_gib * GIB)
        full_token_bytes = 2 * model.num_layers * model.head_dim * model.dtype.itemsize * model.kv_heads
        kv = int(kv // full_token_bytes * token_bytes) if policy.kv_per_replica else kv
        return ServerMemory(weights, kv, int(kv // token_bytes))
    share = config.gpu_memory_utilization or policy.share
    if share is None or limit is None:
        missing = "`rollout.gpu_memory_utilization=…`" if share is None else "`gpu_gib=…`"
        raise ConfigError(
            f"{package} makes what room there is its own, and how much that is cannot be known here. Give {missing}, "
            f"or `rollout.kv_gib=…`."
        )
    budget = share * (limit - used if policy.share_of_free else limit)
    if budget <= weights:
        raise ConfigError(
            f"A server's weights are {weights / GIB:.3g} GiB on each device, and its share of memory is "
            f"{budget / GIB:.3g} GiB (`rollout.gpu_memory_utilization={share:g}`). Raise that, or "
            f"`rollout.tensor_parallel`."
        )
    return ServerMemory(weights, int(budget - weights), int((budget - weights) // token_bytes))


def _bytes_per_rank(name: str, weight: Tensor, model: Model, ranks: int) -> float:
    """Bytes of a weight on each rank: what is multiplied is cut, and a key head that several ranks read is whole on
    each of them."""
    if weight.ndim < 2:
        return weight.nbytes
    shared = any(part in name for part in ("k_proj", "v_proj"))
    return weight.nbytes / (min(ranks, model.kv_heads) if shared else ranks)
