"""The memory of inference servers, computed from their options, because a dry run cannot execute them.

    weights     the model's weights in its precision, split over the ranks of `tensor_parallel`
    KV cache    `rollout.kv_gib`, or the rest of the share of memory that a server takes

Activations and CUDA graphs of the servers are unknown, and the plan notes that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.models import Model
from etude.rollout import ServerConfig
from etude.tools.plan.memory_tracker import PeakMemory
from etude.tools.plan.results import GIB, DeviceMemory
from etude.train import TrainConfig
from etude.train.optim import PRECISIONS


@dataclass(frozen=True)
class ServerMemoryPolicy:
    """The memory policy of one kind of server."""

    share: float | None
    """The default share of a device's memory; None if the server chooses it itself."""
    share_of_free: bool
    """True if the share is of the memory that is free at the start, and not of all memory."""
    share_covers_graphs: bool
    """True if activations and CUDA graphs are inside the share."""
    kv_per_replica: bool
    """True if `rollout.kv_gib` is the total of a replica's ranks, and not the cache of each rank."""


MEMORY_POLICIES = {
    "vLLM": ServerMemoryPolicy(0.92, share_of_free=False, share_covers_graphs=True, kv_per_replica=False),
    "SGLang": ServerMemoryPolicy(None, share_of_free=True, share_covers_graphs=False, kv_per_replica=True),
}
"""The policies of the supported versions, from their source code."""


@dataclass(frozen=True)
class ServerMemory:
    """The memory of one rank of a server, in bytes."""

    weights: int
    kv: int
    tokens: int
    """The capacity of the KV cache of the whole server, in tokens."""

    def peak(self, count: int, name: str) -> PeakMemory:
        """Return the peak of `count` ranks on a device. name: the kind of the weights in the plan."""
        kinds = {name: count * self.weights, "kv": count * self.kv}
        return PeakMemory(sum(kinds.values()), kinds)


def default_memory_share(config: ServerConfig) -> float | None:
    """Return the default share of a device's memory that a server takes; None if it is unknown."""
    policy = MEMORY_POLICIES.get(config.create_backend().package)
    return None if policy is None else policy.share


def add_servers(
    config: ServerConfig,
    hosts: Mapping[torch.device, DeviceMemory],
    model: Model,
    limit: int | None,
    *,
    ranks: int,
    train: TrainConfig,
) -> tuple[tuple[DeviceMemory, ...], int]:
    """Add the servers' memory to the devices of a run. Return the devices, the policy's first, and the KV cache of one
    server in tokens."""
    (device, training), *others = hosts.items()
    itemsize = PRECISIONS[train.precision].itemsize
    if config.url:
        return tuple(hosts.values()), 0
    if device.type == "cpu":
        memory = _server_memory(config, model, itemsize, "cpu", limit, 0)
        return (_add_server(training, memory, config.replicas * config.tensor_parallel, sleeps=False),), memory.tokens
    ranks_on = Counter(config.devices)
    devices = []
    tokens = list[int]()
    used = training.phases["sampling"].total
    for count, gpus in sorted(Counter(ranks_on[gpu] for gpu in range(ranks)).items(), reverse=True):
        if not count:
            devices.append(replace(training, count=gpus))
            continue
        memory = _server_memory(config, model, itemsize, "cuda", limit, used)
        name = "each GPU that trains and serves"
        devices.append(replace(_add_server(training, memory, count, sleeps=train.offload), name=name, count=gpus))
        tokens.append(memory.tokens)
    free = {gpu: count for gpu, count in ranks_on.items() if gpu >= ranks}
    for target, planned in others:
        if count := free.pop(target.index or 0, 0):
            memory = _server_memory(config, model, itemsize, "cuda", limit, planned.total)
            tokens.append(memory.tokens)
            planned = _add_server(planned, memory, count, sleeps=train.offload)
        devices.append(planned)
    remote = (config.nodes - 1) * config.tensor_parallel // config.nodes
    for count, gpus in sorted((Counter(free.values()) + Counter({1: remote})).items()):
        memory = _server_memory(config, model, itemsize, "cuda", limit, 0)
        devices.append(DeviceMemory("each GPU that serves", gpus, {"sampling": memory.peak(count, "weights")}, limit))
        tokens.append(memory.tokens)
    return tuple(devices), min(tokens)


def notes(config: ServerConfig, device: torch.device) -> tuple[str, ...]:
    """Return sentences about the servers' unknown memory."""
    if config.url:
        return (f"The memory of the servers at {', '.join(config.url)} is unknown.",)
    package = config.create_backend().package
    graphs = "activations and CUDA graphs" if device.type == "cuda" else "activations"
    if MEMORY_POLICIES[package].share_covers_graphs and config.kv_gib is None:
        return (
            f"{package} takes its share at the start, and {graphs} reduce its KV cache. The plan does not know how "
            f"much, so the real KV cache has fewer tokens.",
        )
    return (f"{package} also needs memory for {graphs}, which the plan does not know: leave some GiB free.",)


def _add_server(planned: DeviceMemory, memory: ServerMemory, count: int, *, sleeps: bool) -> DeviceMemory:
    """Add `count` server ranks to a device. They may sleep outside of sampling."""
    server_peak, phases = memory.peak(count, "server"), {}
    for phase, peak in planned.phases.items():
        loaded = phase == "sampling" or not sleeps
        phases[phase] = (
            PeakMemory(peak.total + server_peak.total, {**peak.kinds, **server_peak.kinds}) if loaded else peak
        )
    return replace(planned, phases=phases if "sampling" in phases else {"sampling": server_peak, **phases})


def _server_memory(
    config: ServerConfig, model: Model, itemsize: int, device: str, limit: int | None, used: int
) -> ServerMemory:
    """Return the memory of one rank on a device of `limit` bytes, of which `used` bytes are taken at its start.

    itemsize: the bytes of a weight.
    """
    package, ranks = config.create_backend().package, config.tensor_parallel
    if package not in MEMORY_POLICIES:
        raise ConfigError(
            f"The memory policy of {package} is unknown, so it has no plan. Start it separately, and plan the rest "
            f"with its `rollout.url=…`."
        )
    policy = MEMORY_POLICIES[package]
    named_weights = (item for item in model.named_weights() if ".lora_" not in item[0])
    weights = int(sum(itemsize * _numbers_per_rank(name, weight, model, ranks) for name, weight in named_weights))
    if config.needs_untied_head(device) and model.head_weight is model.module.get_input_embeddings().weight:
        weights += itemsize * model.head_weight.numel() // ranks
    full_token_bytes = itemsize * _served_values_per_token(model)
    token_bytes = full_token_bytes / _kv_ranks(model, ranks)
    if config.kv_gib is not None:
        kv = int(config.kv_gib * GIB)
        kv = int(kv // full_token_bytes * token_bytes) if policy.kv_per_replica else kv
        return ServerMemory(weights, kv, int(kv // token_bytes))
    share = config.gpu_memory_utilization or policy.share
    if share is None or limit is None:
        missing = "`rollout.gpu_memory_utilization=…`" if share is None else "`gpu_gib=…`"
        raise ConfigError(
            f"{package} takes a share of the free memory that is unknown here. Give {missing}, or `rollout.kv_gib=…`."
        )
    budget = share * (limit - used if policy.share_of_free else limit)
    if budget <= weights:
        raise ConfigError(
            f"A server's weights are {weights / GIB:.3g} GiB on each device, and its share of memory is "
            f"{budget / GIB:.3g} GiB (`rollout.gpu_memory_utilization={share:g}`). Raise that, or "
            f"`rollout.tensor_parallel`."
        )
    return ServerMemory(weights, int(budget - weights), int((budget - weights) // token_bytes))


def _numbers_per_rank(name: str, weight: Tensor, model: Model, ranks: int) -> float:
    """Return the numbers of a weight on each rank. Matrices are split; a KV head shared by several ranks is whole on
    each."""
    if weight.ndim < 2:
        return weight.numel()
    shared = any(part in name for part in ("k_proj", "v_proj"))
    return weight.numel() / (min(ranks, model.heads.key_heads) if shared else ranks)


def _served_values_per_token(model: Model) -> int:
    """Return the count of numbers that a server keeps for a token. It keeps latent attention's latent keys."""
    config = model.module.config.get_text_config()
    attending = sum(shape is not None for shape in model.attention_shapes)
    if getattr(config, "kv_lora_rank", None):
        return attending * int(config.kv_lora_rank + config.qk_rope_head_dim)
    return model.kv_values_per_token


def _kv_ranks(model: Model, ranks: int) -> int:
    """Return the number of ranks that divide the keys and values of a token: latent ones are whole on each."""
    if getattr(model.module.config.get_text_config(), "kv_lora_rank", None):
        return 1
    return min(ranks, model.heads.key_heads)
