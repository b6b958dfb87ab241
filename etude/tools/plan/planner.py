"""`etude plan`: the peak memory of a run on each kind of device, and the options that lower it.

The options are those of the planned command, and a few for the hardware. A dry run (see `dry_run`) measures the run.
One more dry run for each option that could save memory measures that saving.

With `max_staleness` above 0, engine and trainer compute at the same time. On a device that they share, the working
memory of both is taken at once. Each has its own weights in any case. The rollouts of later steps wait in the
processor's memory until their step trains.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

import torch

from etude.config.tree import replace_option
from etude.dispatch import ClusterBackend
from etude.errors import ConfigError, EtudeError
from etude.models.experts import plan_load
from etude.models.gpu_memory import planned_gpu
from etude.recipes.hub import resolve_hub_names
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.run.machine.placement import PlacementConfig, check_placement_with_servers, gpus_of, role_device
from etude.recipes.run.resume.precision import choose_precision, resolve_precision
from etude.recipes.run.rules import checks
from etude.recipes.run.rules.stale_data import check_staleness
from etude.recipes.run.rules.vision import check_vision
from etude.recipes.supervised.builder import check_loss
from etude.recipes.supervised.config import SupervisedRun
from etude.rollout import ServerConfig, TorchEngineConfig
from etude.rollout.kv_cache import kv_gib
from etude.rollout.server_load import MAX_LIMIT
from etude.tools.doctor.machine import read_memory
from etude.tools.plan.dry_run import dry_run
from etude.tools.plan.dry_run_common import OFFLOADED_KINDS, DryRunResult
from etude.tools.plan.fake_tensors import HOST
from etude.tools.plan.kv_advice import advise_kv
from etude.tools.plan.memory_tracker import PeakMemory
from etude.tools.plan.micro_batch import advise_micro_batch
from etude.tools.plan.options import PlanHardware
from etude.tools.plan.results import GIB, MIB, DeviceMemory, MemoryPlan, MemorySaving
from etude.tools.plan.servers import add_servers, default_memory_share, notes
from etude.tools.plan.step_time import estimate_step_time
from etude.train import TrainConfig
from etude.train.flops import count_active

CPU = torch.device("cpu")
FROZEN = frozenset({"reference", "teacher"})
"""The models that `train.offload` moves to a GPU for each forward pass."""
OTHER_TEACHERS = frozenset({"other teachers"})
"""The teachers but the largest. They wait in CPU memory while that one is on the GPU."""
WAITING = "waiting rollouts"
"""The kind of memory of rollouts that wait."""
TOKEN_BYTES = 17
"""Bytes of a token that waits: id, log-prob, version and turn of 4 bytes each, and whether the model wrote it."""
WORKING = ("activations", "logits")
"""The kinds of memory that an engine needs while it computes, and not between two steps of it."""


def plan_memory(
    requested: Recipe, *, with_savings: bool = True, on_progress: Callable[[], None] = lambda: None
) -> MemoryPlan:
    """Plan a run with dry runs, also with the options that could save memory. on_progress: called before each one."""
    assert isinstance(requested, PlanHardware), "a plan has hardware options"
    run, device = _resolve_layout(requested, requested.gpus)
    on_progress()
    limit, base = _limit(requested, device), _process_bytes(device)
    with planned_gpu(limit if device.type == "cuda" else None), plan_load(requested.expert_load):
        devices, result = _plan_devices(run, device, limit, base)
        expects_load = requested.expert_load != PlanHardware.model_fields["expert_load"].default
        if expects_load and not (result.model.has_experts and run.mesh.expert > 1):
            raise ConfigError(
                f"`expert_load={requested.expert_load:g}` is for a mixture whose experts ranks divide "
                "(`mesh.expert`). This plan has none, so it would do nothing. Leave it out."
            )
        savings = []
        for option, value, changed in _candidates(run, device, result) if with_savings else ():
            on_progress()
            try:
                changed_devices, _ = _plan_devices(changed, device, limit, base)
            except EtudeError:  # such a run would be refused
                continue
            savings.append(MemorySaving(option, value, max(changed_device.total for changed_device in changed_devices)))
        servers = run.servers
        remarks: tuple[str, ...] = () if servers is None else notes(servers, device)
        if servers is not None and not servers.url and result.model.state_bytes:
            remarks += (describe_states(result.model.state_bytes),)
        if device.type != "cpu" and (waiting := waiting_bytes(run, result.row)):
            remarks += (describe_waiting(run.cluster, waiting),)
        remarks += advise_micro_batch(run, device, devices[0], result.row)
        remarks += advise_kv(run, device, devices[0], result)
        if requested.train.precision == "auto":
            reason = choose_precision(device)[1]
            remarks += (f"The plan is for `train.precision={run.train.precision}`: {reason}.",)
        if run.ranks > 1 and not requested.ranks:
            remarks += (
                f"The plan uses `ranks={run.ranks}`, the most that the GPUs allow. Give the run the same option.",
            )
        return MemoryPlan(
            devices=devices,
            ranks=run.ranks,
            row=result.row,
            max_concurrency=result.max_concurrency,
            kv_tokens=result.kv_tokens,
            state_bytes=result.model.state_bytes,
            parameters=sum(weight.numel() for weight in result.model.parameters()),
            active_parameters=count_active(result.model),
            step_time=estimate_step_time(run, device, result, requested.gpu_tflops, requested.gpu_gbs),
            savings=tuple(sorted(savings, key=lambda saving: saving.total)),
            notes=remarks,
        )


def to_dict(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan as plain data."""
    devices = [
        {**asdict(device), "total": device.total, "fits": device.fits, "worst": device.peak_phase}
        for device in plan.devices
    ]
    return {**asdict(plan), "devices": devices, "fits": plan.fits}


def _resolve_layout(requested: Recipe, gpus_wanted: int | None) -> tuple[Recipe, torch.device]:
    """Return the run with its number of ranks, and the device of a rank. gpus_wanted: the GPUs to plan for."""
    if requested.model.path is None:
        raise ConfigError("A plan needs a model: give its directory with `model.path=…`; its weights are not read.")
    requested = resolve_hub_names(requested, weights=False)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = available if gpus_wanted is None and requested.device != "cpu" else gpus_wanted or 0
    if requested.device == "cpu" and gpus:
        raise ConfigError(f"`gpus={gpus}` plans for GPUs, and `device=cpu` computes on the CPU. Leave one out.")
    device = torch.device("cuda", 0) if gpus else CPU
    requested = resolve_precision(requested, device)
    run = replace_option(requested, "ranks", requested.ranks or _ranks(requested, gpus))
    run.mesh.check_ranks(run.ranks)
    _check_run(run)
    if gpus:
        placement = run.placement if isinstance(run, Run) else PlacementConfig()
        _check_gpu_count(gpus, run.ranks, placement, run.servers)
    for option in _gpu_options(run.learners()) if not gpus else ():
        raise ConfigError(
            f"`{option}` frees memory of a GPU, and this plan has no GPU. Leave it out, or give `gpus=…`."
        )
    return run, device


def _gpu_options(learners: Mapping[str, TrainConfig]) -> Iterator[str]:
    for option, train in learners.items():
        if train.offload:
            yield f"{option}.offload"
        if train.activation_checkpointing == "offload":
            yield f"{option}.activation_checkpointing=offload"


def _ranks(run: Recipe, gpus: int) -> int:
    """Return the most ranks that the GPUs allow, without the GPUs of engines and servers; on the CPU one."""
    if not gpus or not isinstance(run, Run):
        return max(gpus, 1)
    servers = run.servers
    if servers is not None and not run.train.offload:
        devices = run.rollout.devices if isinstance(run.rollout, ServerConfig) else ()
        return min(devices) or gpus if devices else max(gpus - len(set(servers.devices)), 1)
    return max(gpus // (2 if run.placement.layout == "split" else 1), 1)


def _check_gpu_count(gpus: int, ranks: int, placement: PlacementConfig, servers: ServerConfig | None) -> None:
    """Refuse a layout that needs more GPUs than the plan has."""
    own = gpus_of(placement, ranks)
    needed = own if servers is None else max([own, *(gpu + 1 for gpu in servers.devices)])
    if needed <= gpus:
        return
    remark = ""
    if placement.layout == "split":
        remark = f", and one more for each engine (`placement.layout=split`): {2 * ranks}"
    if servers is not None and needed > own:
        remark = f", and those of its servers up to number {needed - 1} (`rollout.devices`)"
    raise ConfigError(
        f"The plan has `gpus={gpus}`, and this layout needs {needed}: one for each of `ranks={ranks}`{remark}. "
        f"Lower `ranks`, place models elsewhere, or ask for more GPUs."
    )


def _check_run(run: Recipe) -> None:
    """Refuse a run that `etude train` would refuse too."""
    check_vision(run)
    if isinstance(run, SupervisedRun):
        check_loss(run)
        return
    assert isinstance(run, Run), "every recipe is one or the other"
    checks.check_engine(run.train.choose_engine(run.ranks), run.critic, run.placement)
    checks.check_algorithm(run)
    check_staleness(run)
    if run.servers is not None:
        checks.check_servers(replace_option(run, "train.offload", False))  # offloading depends on the planned device
        check_placement_with_servers(run.placement)


def _plan_devices(
    run: Recipe, device: torch.device, limit: int | None, base_bytes: int
) -> tuple[tuple[DeviceMemory, ...], DryRunResult]:
    """Return the memory of each kind of device, the policy's device first, and the dry run on that device."""
    planned, first = dict[torch.device, DeviceMemory](), None
    kv_tokens = 0
    overlaps = isinstance(run, Run) and run.max_staleness > 0
    full_kl = isinstance(run, Run) and "full_kl" in run.forward_outputs()
    for target, roles in _roles_by_device(run, device).items():
        result = dry_run(run, device, roles)
        first = first or result
        kv_tokens = max(kv_tokens, result.kv_tokens)
        name, count, sharing = _describe_device(run.ranks, target, roles, samples=isinstance(run, Run))
        phases, in_host = dict[str, PeakMemory](), [0]
        for phase in result.memory.phases:
            offloaded = [frozenset({HOST})]
            if run.train.offload and "policy" in roles:
                offloaded = [kinds | {HOST} for kinds in _offloaded_kinds(roles, phase, full_kl=full_kl)]
            peaks = [result.memory.peak(phase, excluded=kinds) for kinds in offloaded]
            peak = max(peaks, key=attrgetter("total"))
            phases[phase] = PeakMemory(
                peak.total * sharing, {kind: size * sharing for kind, size in peak.kinds.items()}
            )
            in_host += [result.memory.peak(phase, only=kinds).total * sharing for kinds in offloaded]
        if overlaps and {"policy", "engine"} <= roles:
            phases = add_to_phases(phases, engine_activations(phases["sampling"]), but="sampling")
        if target.type == "cpu" and (waiting := waiting_bytes(run, result.row)):
            phases = add_to_phases(phases, {WAITING: waiting})
        planned[target] = DeviceMemory(name, count, phases, limit, base_bytes * sharing, max(in_host))
    assert first is not None, "the policy has a device"
    servers = run.servers
    if servers is None:
        return tuple(planned.values()), replace(first, kv_tokens=kv_tokens)
    devices, tokens = add_servers(servers, planned, first.model, limit, ranks=run.ranks, train=run.train)
    return devices, replace(first, kv_tokens=tokens, max_concurrency=servers.max_num_seqs or MAX_LIMIT)


def waiting_bytes(run: Recipe, row: tuple[int, int]) -> int:
    """Return the most bytes of rollouts that wait; 0 without staleness. row: the longest prompt and answer."""
    if not isinstance(run, Run) or not run.max_staleness:
        return 0
    rollouts = (run.max_staleness + 1) * run.collect.tasks * run.collect.group_size
    return rollouts * sum(row) * TOKEN_BYTES


def engine_activations(sampling: PeakMemory) -> Mapping[str, int]:
    """Return the memory, by kind, of an engine that samples during the other phases too."""
    return {kind: sampling.kinds[kind] for kind in WORKING if kind in sampling.kinds}


def add_to_phases(
    phases: Mapping[str, PeakMemory], added: Mapping[str, int], *, but: str = ""
) -> dict[str, PeakMemory]:
    """Return the phases with this memory in each, by kind. but: a phase that has it already."""
    more = Counter(added)
    return {
        name: peak if name == but else PeakMemory(peak.total + more.total(), dict(Counter(peak.kinds) + more))
        for name, peak in phases.items()
    }


def describe_states(size: int) -> str:
    """Return a sentence about the states that servers keep for a request, of `size` bytes."""
    return (
        f"The servers also keep the states of recurrent layers in the memory of the KV cache, at least "
        f"{size / MIB:.3g} MiB for each request. The plan does not subtract them, so the real KV cache has fewer "
        f"tokens."
    )


def describe_waiting(cluster: ClusterBackend, size: int) -> str:
    """Return a sentence about rollouts that wait, for a plan of GPUs."""
    where = "Ray's object store" if cluster == "ray" else "the processor's memory"
    return f"Rollouts that wait for their step take up to {size / GIB:.3g} GiB of {where} (`max_staleness`)."


def _offloaded_kinds(roles: frozenset[str], phase: str, *, full_kl: bool) -> list[frozenset[str]]:
    """Return the kinds that `train.offload` moves to CPU memory during a phase, at its different times. A critic has
    its own option.

    full_kl: each update calls the reference, which stays.
    """
    kinds = frozenset(OTHER_TEACHERS)
    if phase == "sampling" or (phase == "annotating" and "critic" not in roles):
        kinds |= OFFLOADED_KINDS
    if phase != "annotating":
        return [kinds | FROZEN - ({"reference"} if full_kl else set())]
    if full_kl:
        return [kinds]
    return [kinds | {waiting} for waiting in sorted(FROZEN)]  # one of the models computes, and the other waits


def _roles_by_device(run: Recipe, device: torch.device) -> dict[torch.device, frozenset[str]]:
    """Return the models on each device, as the first rank names the devices.

    In a plan for the CPU all models share it. In a plan for GPUs, models on the CPU take no GPU memory and are left
    out.
    """
    if not isinstance(run, Run):
        return {device: frozenset({"policy"})}
    active, sampler = run.active_roles(), {"engine"} if run.servers is None else set[str]()
    if device.type == "cpu":
        return {device: frozenset({"policy"} | sampler | active)}
    engine = torch.device("cuda", run.ranks) if run.placement.layout == "split" else device
    hosts: dict[torch.device, set[str]] = {device: {"policy"}}
    hosts.setdefault(engine, set()).update(sampler)
    for role in sorted(active):
        target = role_device(run.placement, role, policy=device, engine=engine)
        if target.type != "cpu":
            hosts.setdefault(target, set()).add(role)
    return {target: frozenset(roles) for target, roles in hosts.items()}


def _describe_device(ranks: int, target: torch.device, roles: frozenset[str], *, samples: bool) -> tuple[str, int, int]:
    """Return the name of a kind of device, the number of such devices, and the number of ranks that share one.

    samples: the run samples, and does not only train.
    """
    if target.type == "cpu":
        return "the processor's memory", 1, ranks
    if "policy" in roles:
        has_own_engine = samples and "engine" not in roles
        return "each GPU that trains" if has_own_engine else "each GPU", ranks, 1
    if "engine" in roles:
        return "each GPU that samples", ranks, 1
    return f"{target}, with {' and '.join(sorted(roles))}", 1, ranks


def _limit(requested: PlanHardware, device: torch.device) -> int | None:
    if device.type == "cpu":
        return read_memory()[0]
    if requested.gpu_gib is not None:
        return int(requested.gpu_gib * GIB)
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _process_bytes(device: torch.device) -> int:
    """Return the memory of the program without a model: the peak of this process so far; 0 for a GPU."""
    if device.type != "cpu":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _candidates(run: Recipe, device: torch.device, result: DryRunResult) -> list[tuple[str, str, Recipe]]:
    """Return the options that could save memory: option, value, and the run with that value."""
    train = run.train
    mesh = run.mesh
    gpu = device.type == "cuda"
    checkpointing = train.activation_checkpointing
    can_double = gpu and run.ranks % (2 * mesh.replicas * mesh.ranks_per_rollout) == 0
    compiles_layers = train.compile is True and train.choose_engine(run.ranks) == "fsdp"
    options: list[tuple[str, object, bool]] = [
        ("train.max_tokens_per_micro_batch", max(train.max_tokens_per_micro_batch // 2, 1), True),
        ("train.activation_checkpointing", "selective", checkpointing == "none" and not compiles_layers),
        ("train.activation_checkpointing", "full", checkpointing in ("none", "selective")),
        ("train.activation_checkpointing", "offload", gpu and checkpointing != "offload"),
        ("train.offload", True, gpu and not train.offload and not (isinstance(run, Run) and run.max_staleness)),
        ("checkpoint.async_save", False, not gpu and run.checkpoint.async_save),
        ("train.precision", "bf16", train.precision in ("fp32", "fp64")),
        ("ranks", 2 * run.ranks, gpu),
        ("mesh.tensor", 2 * mesh.tensor, can_double and not compiles_layers),
        ("mesh.context", 2 * mesh.context, can_double),
    ]
    if isinstance(run, SupervisedRun):
        options.append(("data.max_tokens", max(sum(result.row) // 2, 2), True))
    elif isinstance(run, Run):
        rollout = run.rollout
        options.append(("max_staleness", run.max_staleness // 2, run.max_staleness > 0))
        options.append(("sampling.max_tokens", max(run.sampling.max_tokens // 2, 1), run.sampling.max_tokens > 1))
        if isinstance(rollout, TorchEngineConfig):
            options.append(("rollout.kv_gib", kv_gib(device, rollout) / 2, True))
            options.append(("rollout.max_num_seqs", max(rollout.max_num_seqs // 2, 1), rollout.max_num_seqs > 1))
            options.append(("rollout.prepack", False, not gpu and rollout.prepack))
        servers = run.servers
        if servers is not None and not servers.url:
            memory = servers.gpu_memory_utilization or default_memory_share(servers)
            options.append(("rollout.kv_gib", (servers.kv_gib or 0) / 2, servers.kv_gib is not None))
            options.append(
                ("rollout.gpu_memory_utilization", (memory or 0) / 2, servers.kv_gib is None and memory is not None)
            )
    return [
        (option, _format_value(value), replace_option(run, option, value))
        for option, value, applies in options
        if applies
    ]


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
