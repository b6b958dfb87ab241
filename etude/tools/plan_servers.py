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
from etude.recipes.placement import gpus_of_servers
from etude.recipes.run import Run
from etude.rollout import ServerConfig
from etude.tools.ledger import Peak
from etude.tools.planned import GIB, Planned

__all__ = ["beside", "furthest", "notes", "places", "server_of", "share_of"]


@dataclass(frozen=True)
class Habit:
    """How servers of a kind take memory."""

    share: float | None
    """Of a device's, unless they are told; None where each finds out for itself."""
    of_free: bool
    """Whether the share is of what is free as one starts, and not of all."""
    with_graphs: bool
    """Whether activations and CUDA graphs are taken from the share."""
    kv_of_all: bool
    """Whether `rollout.kv_gib` is what the ranks of a replica hold together, and not each."""


HABITS = {
    "vLLM": Habit(0.92, of_free=False, with_graphs=True, kv_of_all=False),
    "SGLang": Habit(None, of_free=True, with_graphs=False, kv_of_all=True),
}
"""Of the supported versions, as their sources have it."""


@dataclass(frozen=True)
class Held:
    """What one rank of a server holds."""

    weights: int
    kv: int
    tokens: int
    """How many have their keys and values there, in the server as a whole."""

    def peak(self, count: int, name: str) -> Peak:
        """Of so many; its weights are known by this name."""
        kinds = {name: count * self.weights, "kv": count * self.kv}
        return Peak(sum(kinds.values()), kinds)


def server_of(run: Run) -> ServerConfig | None:
    """The options of the servers that sample, where such do, with the GPUs that they would have."""
    if not isinstance(run.rollout, ServerConfig):
        return None
    return run.rollout.model_copy(update={"devices": gpus_of_servers(run, run.rollout)})


def share_of(config: ServerConfig) -> float | None:
    """The share of a device's memory that they take unless they are told; None where that is not known."""
    habit = HABITS.get(config.dialect().package)
    return None if habit is None else habit.share


def places(config: ServerConfig) -> Counter[int]:
    """The GPUs of this machine that servers compute on, and how many ranks of theirs each has."""
    return Counter(config.devices)


def furthest(config: ServerConfig) -> int:
    """How many GPUs there have to be for them."""
    return max(places(config), default=-1) + 1


def beside(
    run: Run, config: ServerConfig, hosts: Mapping[torch.device, Planned], model: Model, limit: int | None
) -> tuple[tuple[Planned, ...], int]:
    """The devices of a run with what servers hold there, that on which the policy learns first; and how many tokens one
    server has keys and values of."""
    (device, trains), *others = hosts.items()
    if config.url:
        return tuple(hosts.values()), 0
    if device.type == "cpu":
        held = _held(config, model, "cpu", limit, 0)
        return (_with(trains, held, config.replicas * config.tensor_parallel, asleep=False),), held.tokens
    there, found, tokens = places(config), [], list[int]()
    resting = trains.phases["sampling"].total
    for count, gpus in sorted(Counter(there[gpu] for gpu in range(run.ranks)).items(), reverse=True):
        if not count:
            found.append(replace(trains, count=gpus))
            continue
        held = _held(config, model, "cuda", limit, resting)
        name = "each GPU that trains and serves"
        found.append(replace(_with(trains, held, count, asleep=run.train.offload), name=name, count=gpus))
        tokens.append(held.tokens)
    free = {gpu: count for gpu, count in there.items() if gpu >= run.ranks}
    for where, planned in others:
        count = free.pop(where.index or 0, 0)
        held = _held(config, model, "cuda", limit, planned.total) if count else Held(0, 0, 0)
        found.append(_with(planned, held, count, asleep=run.train.offload) if count else planned)
        tokens += [held.tokens] if count else []
    elsewhere = (config.nodes - 1) * config.tensor_parallel // config.nodes
    for count, gpus in sorted((Counter(free.values()) + Counter({1: elsewhere})).items()):
        held = _held(config, model, "cuda", limit, 0)
        found.append(Planned("each GPU that serves", gpus, {"sampling": held.peak(count, "weights")}, limit))
        tokens.append(held.tokens)
    return tuple(found), min(tokens)


def notes(config: ServerConfig, device: torch.device) -> tuple[str, ...]:
    """What is not known of them."""
    if config.url:
        return (f"What the servers at {', '.join(config.url)} hold is not known here.",)
    package = config.dialect().package
    graphs = "activations and CUDA graphs" if device.type == "cuda" else "activations"
    if HABITS[package].with_graphs and config.kv_gib is None:
        return (
            f"{package} takes its share as it starts, and what it finds that {graphs} want is taken from keys and "
            f"values: how much that is, is not rehearsed, and so many tokens fewer are held.",
        )
    return (f"What {package} wants for {graphs} comes to that, and is not rehearsed: leave it some GiB.",)


def _with(planned: Planned, held: Held, count: int, *, asleep: bool) -> Planned:
    """A device with so many ranks of servers. They start when all else is loaded, and may sleep while it works."""
    served, phases = held.peak(count, "server"), {}
    for phase, peak in planned.phases.items():
        here = phase == "sampling" or not (asleep or phase == "loading")
        phases[phase] = Peak(peak.total + served.total, {**peak.kinds, **served.kinds}) if here else peak
    return replace(planned, phases=phases if "sampling" in phases else {"sampling": served, **phases})


def _held(config: ServerConfig, model: Model, device: str, limit: int | None, resting: int) -> Held:
    """What one rank holds on a device of so many bytes, of which others hold some as it starts."""
    package, ranks = config.dialect().package, config.tensor_parallel
    if package not in HABITS:
        raise ConfigError(
            f"How {package} takes memory is not known, so no plan can be made of it. Start it by itself, and plan the "
            f"rest with its `rollout.url=…`."
        )
    habit = HABITS[package]
    own = (each for each in model.named_weights() if ".lora_" not in each[0])
    weights = int(sum(_of_rank(name, weight, model, ranks) for name, weight in own))
    if config.untied(device) and model.head_weight is model.module.get_input_embeddings().weight:
        weights += model.head_weight.nbytes // ranks
    of_token = 2 * model.layers * model.head_dim * model.dtype.itemsize * (model.kv_heads / min(ranks, model.kv_heads))
    if config.kv_gib is not None:
        kv = int(config.kv_gib * GIB)
        whole = 2 * model.layers * model.head_dim * model.dtype.itemsize * model.kv_heads
        kv = int(kv // whole * of_token) if habit.kv_of_all else kv
        return Held(weights, kv, int(kv // of_token))
    share = config.memory or habit.share
    if share is None or limit is None:
        missing = "`rollout.memory=…`" if share is None else "`gpu_gib=…`"
        raise ConfigError(
            f"{package} makes what room there is its own, and how much that is cannot be known here. Give {missing}, "
            f"or `rollout.kv_gib=…`."
        )
    taken = share * (limit - resting if habit.of_free else limit)
    if taken <= weights:
        raise ConfigError(
            f"A server's weights are {weights / GIB:.3g} GiB on each device, and its share of memory is "
            f"{taken / GIB:.3g} GiB (`rollout.memory={share:g}`). Raise that, or `rollout.tensor_parallel`."
        )
    return Held(weights, int(taken - weights), int((taken - weights) // of_token))


def _of_rank(name: str, weight: Tensor, model: Model, ranks: int) -> float:
    """Bytes of a weight on each rank: what is multiplied is cut, and a key head that several ranks read is whole on
    each of them."""
    if weight.ndim < 2:
        return weight.nbytes
    shared = any(part in name for part in ("k_proj", "v_proj"))
    return weight.nbytes / (min(ranks, model.kv_heads) if shared else ranks)
