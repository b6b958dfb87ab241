"""`etude plan`: what a run will hold in memory at its worst, on each kind of device, and which option moves that.

The options are those of the command that the run is for, with a few more that say what it shall run on. The run is
rehearsed, see `dry_run`, and once more for each option that could make it smaller: what an option saves is what was
then not held.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

from etude.config import Config
from etude.errors import ConfigError, EtudeError
from etude.recipes.hub import resolve_hub_names
from etude.recipes.recipe import Recipe
from etude.recipes.run import checks
from etude.recipes.run.config import Run
from etude.recipes.run.placement import check_placement_with_servers, gpus_of, role_device
from etude.recipes.supervised.builder import check_loss
from etude.recipes.supervised.config import SupervisedRun
from etude.rollout import ServerConfig, TorchEngineConfig
from etude.tools.doctor.machine import read_memory
from etude.tools.plan.dry_run import dry_run
from etude.tools.plan.dry_run_common import OFFLOADED_KINDS, DryRunResult
from etude.tools.plan.memory_tracker import PeakMemory
from etude.tools.plan.options import PlanHardware
from etude.tools.plan.results import GIB, DeviceMemory, MemoryPlan, MemorySaving
from etude.tools.plan.servers import add_servers, default_memory_share, gpus_needed, notes, ranks_by_gpu, server_options
from etude.tools.plan.step_time import estimate_step_time

__all__ = ["plan_memory", "to_dict"]

R = TypeVar("R", bound=Recipe)
C = TypeVar("C", bound=Config)
CPU = torch.device("cpu")
FROZEN = frozenset({"reference", "teacher"})
"""What is brought to a GPU for each question, under `train.offload`."""


def plan_memory(
    requested: Recipe, *, with_savings: bool = True, on_progress: Callable[[str], None] = lambda _: None
) -> MemoryPlan:
    """Rehearse a run, and what would make it smaller. tell: hears what is under way."""
    assert isinstance(requested, PlanHardware), "a plan is for something"
    run, device = _resolve_layout(requested, requested.gpus)
    on_progress("the run as it is asked for")
    limit, base = _limit(requested, device), _process_bytes(device)
    devices, result = _plan_devices(run, device, limit, base)
    savings = []
    for option, value, changed in _candidates(run, device, result) if with_savings else ():
        on_progress(f"{option}={value}")
        try:
            changed_devices, _ = _plan_devices(changed, device, limit, base)
        except EtudeError:  # such a run would be refused, and is no way out
            continue
        savings.append(MemorySaving(option, value, max(changed_device.total for changed_device in changed_devices)))
    servers = server_options(run) if isinstance(run, Run) else None
    remarks: tuple[str, ...] = () if servers is None else notes(servers, device)
    if run.ranks > 1 and not requested.ranks:
        remarks += (f"That is with `ranks={run.ranks}`, as many as there is room for: give it to the run too.",)
    return MemoryPlan(
        devices=devices,
        ranks=run.ranks,
        row=result.row,
        max_concurrency=result.max_concurrency,
        kv_tokens=result.kv_tokens,
        parameters=sum(weight.numel() for weight in result.model.parameters()),
        step_time=estimate_step_time(run, device, result, requested.gpu_tflops, requested.gpu_gbs),
        savings=tuple(sorted(savings, key=lambda saving: saving.total)),
        notes=remarks,
    )


def to_dict(plan: MemoryPlan) -> dict[str, Any]:
    """All of it as plain data."""
    devices = [
        {**asdict(device), "total": device.total, "fits": device.fits, "worst": device.peak_phase}
        for device in plan.devices
    ]
    return {**asdict(plan), "devices": devices, "fits": plan.fits}


def _resolve_layout(requested: Recipe, gpus_wanted: int | None) -> tuple[Recipe, torch.device]:
    """The run with as many ranks as there are GPUs for, and what each computes on. wanted: GPUs to plan for."""
    if requested.model.path is None:
        raise ConfigError("A plan is of a model: give its directory with `model.path=…`; its weights are not read.")
    requested = resolve_hub_names(requested, weights=False)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = available if gpus_wanted is None and requested.device != "cpu" else gpus_wanted or 0
    if requested.device == "cpu" and gpus:
        raise ConfigError(f"`gpus={gpus}` plans for GPUs, and `device=cpu` computes on the processor. Leave one out.")
    run = _with_option(requested, "ranks", requested.ranks or _ranks(requested, gpus))
    run.mesh.check_ranks(run.ranks)
    _check_run(run)
    if gpus:
        _check_gpu_count(run, gpus)
    if run.train.offload and not gpus:
        raise ConfigError(
            "`train.offload` makes room on a GPU, and this plan has none. Leave it out, or give `gpus=…`."
        )
    return run, torch.device("cuda", 0) if gpus else CPU


def _ranks(run: Recipe, gpus: int) -> int:
    """As many as there is room for: beside engines and servers that have GPUs of their own. On the processor, one."""
    if not gpus or not isinstance(run, Run):
        return max(gpus, 1)
    servers = server_options(run)
    if servers is not None and not run.train.offload:
        devices = run.rollout.devices if isinstance(run.rollout, ServerConfig) else ()
        return min(devices) or gpus if devices else max(gpus - len(ranks_by_gpu(servers)), 1)
    return max(gpus // (2 if run.placement.layout == "split" else 1), 1)


def _check_gpu_count(run: Recipe, gpus: int) -> None:
    """Refuse what wants more GPUs than the plan is for."""
    servers = server_options(run) if isinstance(run, Run) else None
    own = gpus_of(run) if isinstance(run, Run) else run.ranks
    needed = max(own, gpus_needed(servers)) if servers is not None else own
    if needed <= gpus:
        return
    remark = ""
    if isinstance(run, Run) and run.placement.layout == "split":
        remark = f", and one more for each engine (`placement.layout=split`): {2 * run.ranks}"
    if servers is not None and needed > own:
        remark = f", and those of its servers up to number {needed - 1} (`rollout.devices`)"
    raise ConfigError(
        f"The plan is for `gpus={gpus}`, and this layout wants {needed}: one for each of `ranks={run.ranks}`{remark}. "
        f"Lower `ranks`, place models elsewhere, or ask for more GPUs."
    )


def _check_run(run: Recipe) -> None:
    """Refuse what could not be run either."""
    checks.check_divided_weights(run)
    if isinstance(run, SupervisedRun):
        check_loss(run)
        return
    assert isinstance(run, Run), "every recipe is one or the other"
    checks.check_algorithm(run)
    if server_options(run) is not None:
        checks.check_servers(
            _with_option(run, "train.offload", False)
        )  # which is a question of the device that is planned for
        check_placement_with_servers(run.placement)


def _plan_devices(
    run: Recipe, device: torch.device, limit: int | None, base_bytes: int
) -> tuple[tuple[DeviceMemory, ...], DryRunResult]:
    """Every kind of device with all that it holds, that of the policy first; and the rehearsal on it."""
    planned, first = dict[torch.device, DeviceMemory](), None
    for target, roles in _roles_by_device(run, device).items():
        result = dry_run(run, device, roles)
        first = first or result
        name, count, sharing = _describe_device(run, target, roles)
        phases = {}
        for phase in result.tracker.phases:
            peak = result.tracker.peak(phase, _offloaded_kinds(run, roles, phase))
            phases[phase] = PeakMemory(
                peak.total * sharing, {kind: size * sharing for kind, size in peak.kinds.items()}
            )
        planned[target] = DeviceMemory(name, count, phases, limit, base_bytes * sharing)
    assert first is not None, "the policy is somewhere"
    servers = server_options(run) if isinstance(run, Run) else None
    if servers is None or not isinstance(run, Run):
        return tuple(planned.values()), first
    devices, tokens = add_servers(run, servers, planned, first.model, limit)
    return devices, replace(first, kv_tokens=tokens, max_concurrency=servers.max_num_seqs)


def _offloaded_kinds(run: Recipe, roles: frozenset[str], phase: str) -> frozenset[str]:
    """What `train.offload` has rest in the processor's memory meanwhile. A critic has an option of its own for that."""
    if not run.train.offload or "policy" not in roles:
        return frozenset()
    needs_full_kl = isinstance(run, Run) and "full_kl" in run.forward_outputs()
    offloaded = (
        OFFLOADED_KINDS
        if phase == "sampling" or (phase == "annotating" and "critic" not in roles)
        else frozenset[str]()
    )
    return offloaded | (frozenset() if phase == "annotating" or needs_full_kl else FROZEN)


def _roles_by_device(run: Recipe, device: torch.device) -> dict[torch.device, frozenset[str]]:
    """Who is on which device, as the first rank names them. On the processor all are together; who is there while the
    policy is on a GPU takes nothing of any GPU."""
    if not isinstance(run, Run):
        return {device: frozenset({"policy"})}
    active, sampler = checks.active_roles(run), {"engine"} if server_options(run) is None else set[str]()
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


def _describe_device(run: Recipe, target: torch.device, roles: frozenset[str]) -> tuple[str, int, int]:
    """What such devices are called, how many there are, and how many ranks share one."""
    if target.type == "cpu":
        return "the processor's memory", 1, run.ranks
    if "policy" in roles:
        has_own_engine = isinstance(run, Run) and "engine" not in roles
        return "each GPU that trains" if has_own_engine else "each GPU", run.ranks, 1
    if "engine" in roles:
        return "each GPU that samples", run.ranks, 1
    return f"{target}, with {' and '.join(sorted(roles))}", 1, run.ranks


def _limit(requested: PlanHardware, device: torch.device) -> int | None:
    if device.type == "cpu":
        return read_memory()[0]
    if requested.gpu_gib is not None:
        return int(requested.gpu_gib * GIB)
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _process_bytes(device: torch.device) -> int:
    """What a process holds that has loaded the program and no model: this one, as it stands."""
    if device.type != "cpu":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _candidates(run: Recipe, device: torch.device, result: DryRunResult) -> list[tuple[str, str, Recipe]]:
    """Options that could make a run smaller, each with the run that has it."""
    train, mesh, gpu = run.train, run.mesh, device.type == "cuda"
    options: list[tuple[str, object, bool]] = [
        ("train.max_tokens_per_micro_batch", max(train.max_tokens_per_micro_batch // 2, 1), True),
        ("train.activation_checkpointing", True, not train.activation_checkpointing),
        ("train.offload", True, gpu and not train.offload),
        ("train.precision", "bf16", train.precision in ("fp32", "fp64")),
        ("train.weights", "divided", run.ranks > 1 and train.weights == "whole" and not run.lora.is_enabled),
        ("ranks", 2 * run.ranks, gpu),
        ("mesh.tensor", 2 * mesh.tensor, gpu and run.ranks % (2 * mesh.size) == 0),
        ("mesh.sequence", 2 * mesh.sequence, gpu and run.ranks % (2 * mesh.size) == 0),
    ]
    if isinstance(run, SupervisedRun):
        options.append(("data.max_tokens", max(sum(result.row) // 2, 2), True))
    elif isinstance(run, Run):
        rollout, critic = run.rollout, run.critic.train
        trains_critic = run.ranks > 1 and "critic" in checks.active_roles(run)
        options.append(("critic.train.weights", "divided", trains_critic and critic.weights == "whole"))
        options.append(("sampling.max_tokens", max(run.sampling.max_tokens // 2, 1), run.sampling.max_tokens > 1))
        if isinstance(rollout, TorchEngineConfig):
            options.append(("rollout.kv_gib", rollout.kv_gib / 2, True))
            options.append(("rollout.max_num_seqs", max(rollout.max_num_seqs // 2, 1), rollout.max_num_seqs > 1))
            options.append(("rollout.prepack", False, not gpu and rollout.prepack))
        servers = server_options(run)
        if servers is not None and not servers.url:
            memory = servers.gpu_memory_utilization or default_memory_share(servers)
            options.append(("rollout.kv_gib", (servers.kv_gib or 0) / 2, servers.kv_gib is not None))
            options.append(
                ("rollout.gpu_memory_utilization", (memory or 0) / 2, servers.kv_gib is None and memory is not None)
            )
    return [
        (option, _format_value(value), _with_option(run, option, value))
        for option, value, applies in options
        if applies
    ]


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _with_option(run: R, option: str, value: object) -> R:
    """The run with one option changed."""
    return _replace_at(run, option.split("."), value)


def _replace_at(config: C, path: list[str], value: object) -> C:
    name, *rest = path
    return config.model_copy(update={name: _replace_at(getattr(config, name), rest, value) if rest else value})
