"""`etude plan`: what a run will hold in memory at its worst, on each kind of device, and which option moves that.

The options are those of `etude train`, with a few more that say what it shall run on. The run is rehearsed, see
`rehearsal`, and once more for each option that could make it smaller: what an option saves is what was then not held.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from pydantic import Field

from etude.errors import ConfigError, EtudeError
from etude.recipes import checks
from etude.recipes.folder import check_model
from etude.recipes.placement import gpus_of, placed
from etude.recipes.run import Run
from etude.rollout import EngineConfig
from etude.tools.doctor.machine import room
from etude.tools.ledger import Peak
from etude.tools.pace import Pace, pace
from etude.tools.rehearsal import AT_REST, Rehearsed, rehearse, sampling

__all__ = ["GIB", "Knob", "Plan", "PlanRun", "Planned", "plan", "tree"]

GIB = 2**30
CPU = torch.device("cpu")


class PlanRun(Run):
    """A run, and what it is planned for."""

    gpus: int | None = Field(
        None, ge=0, le=4096, description="GPUs to plan for; 0 is the processor, null those that torch reaches here"
    )
    gpu_gib: float | None = Field(None, gt=0, description="GiB of memory that each has; null is what those here have")
    gpu_tflops: float | None = Field(
        None, gt=0, description="10¹² operations a second that each can do; null is measured where there is one"
    )
    gpu_gbs: float | None = Field(
        None, gt=0, description="10⁹ bytes a second that each can read; null is measured where there is one"
    )


@dataclass(frozen=True)
class Planned:
    """What one device of a kind holds."""

    name: str
    count: int
    """How many of them there are."""
    phases: Mapping[str, Peak]
    """The most that is held in each phase of a step."""
    limit: int | None
    """Bytes that it has, where that is known."""
    also: int = 0
    """Bytes of the program itself, which is no tensor's."""

    @property
    def worst(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def total(self) -> int:
        """Bytes, at the worst moment."""
        return self.phases[self.worst].total + self.also

    @property
    def fits(self) -> bool | None:
        """Whether it has room for that."""
        return None if self.limit is None else self.total <= self.limit


@dataclass(frozen=True)
class Knob:
    """An option, set to something else, and what the fullest device would hold then."""

    option: str
    value: str
    total: int


@dataclass(frozen=True)
class Plan:
    """What was found."""

    devices: tuple[Planned, ...]
    """The one on which the policy learns is the first."""
    ranks: int
    row: tuple[int, int]
    """The longest prompt, and its longest answer."""
    at_once: int
    """Answers that are drawn at once on a rank."""
    cached: int
    """Tokens that its engine holds keys and values of."""
    parameters: int
    pace: Pace | None
    knobs: tuple[Knob, ...] = field(default=())

    @property
    def fits(self) -> bool | None:
        """Whether every device has room."""
        answers = [device.fits for device in self.devices]
        return None if None in answers else all(answers)


def plan(asked: PlanRun, *, knobs: bool = True, tell: Callable[[str], None] = lambda _: None) -> Plan:
    """Rehearse a run, and what would make it smaller. tell: hears what is under way."""
    run, device = _settled(asked)
    tell("the run as it is asked for")
    limit, base = _limit(asked, device), _own_size(device)
    devices, played = _planned(run, device, limit, base)
    turned = []
    for option, value, changed in _candidates(run, device) if knobs else ():
        tell(f"{option}={value}")
        try:
            others, _ = _planned(changed, device, limit, base)
        except EtudeError:  # such a run would be refused, and is no way out
            continue
        turned.append(Knob(option, value, max(other.total for other in others)))
    return Plan(
        devices=devices,
        ranks=run.ranks,
        row=played.row,
        at_once=played.at_once,
        cached=played.held,
        parameters=sum(weight.numel() for weight in played.model.parameters()),
        pace=pace(run, device, played, asked.gpu_tflops, asked.gpu_gbs),
        knobs=tuple(sorted(turned, key=lambda knob: knob.total)),
    )


def tree(plan: Plan) -> dict[str, Any]:
    """All of it as plain data."""
    devices = [{**asdict(each), "total": each.total, "fits": each.fits, "worst": each.worst} for each in plan.devices]
    return {**asdict(plan), "devices": devices, "fits": plan.fits}


def _settled(asked: PlanRun) -> tuple[Run, torch.device]:
    """The run with as many ranks as there are GPUs for, and what each computes on."""
    if asked.model.path is None:
        raise ConfigError("A plan is of a model: give its directory with `model.path=…`; its weights are not read.")
    check_model(asked.model.path)
    if not isinstance(asked.rollout, EngineConfig):
        raise ConfigError(
            "A plan rehearses the embedded engine; what a server holds is its own, on the GPUs that `rollout.devices` "
            "names and up to the share of them that `rollout.memory` is. Plan the rest with `rollout=embedded`."
        )
    if asked.mesh.size > 1:
        raise ConfigError(
            "A plan is of ranks that have their rollouts to themselves; how much less each holds where `mesh` has "
            "several divide them is not rehearsed. Leave `mesh` out: what is told then is the most that it can be."
        )
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = here if asked.gpus is None and asked.device != "cpu" else asked.gpus or 0
    if asked.device == "cpu" and gpus:
        raise ConfigError(f"`gpus={gpus}` plans for GPUs, and `device=cpu` computes on the processor. Leave one out.")
    each = 2 if asked.placement.layout == "split" else 1
    given = {name: getattr(asked, name) for name in Run.model_fields}
    ranks = max(gpus // each, 1) if asked.ranks == 1 else asked.ranks
    run = Run.model_construct(**(given | {"ranks": ranks if gpus else asked.ranks}))
    if gpus and gpus_of(run) > gpus:
        apart = f", and one more for each engine (`placement.layout=split`): {2 * ranks}" if each == 2 else ""
        raise ConfigError(
            f"The plan is for `gpus={gpus}`, and this layout wants {gpus_of(run)}: one for each of `ranks={ranks}`"
            f"{apart}. Lower `ranks`, place models elsewhere, or ask for more GPUs."
        )
    checks.algorithm(run)
    if run.train.offload and not gpus:
        raise ConfigError(
            "`train.offload` makes room on a GPU, and this plan has none. Leave it out, or give `gpus=…`."
        )
    return run, torch.device("cuda", 0) if gpus else CPU


def _planned(run: Run, device: torch.device, limit: int | None, also: int) -> tuple[tuple[Planned, ...], Rehearsed]:
    """Every kind of device with all that it holds, that of the policy first; and the rehearsal on it."""
    found, first = [], None
    for where, roles in _hosts(run, device).items():
        played = rehearse(run, device, roles)
        first = first or played
        name, count, copies = _named(run, where, roles)
        phases = {}
        for phase in played.ledger.phases:
            away = AT_REST if run.train.offload and phase == "sampling" else frozenset[str]()
            peak = played.ledger.peak(phase, away)
            phases[phase] = Peak(peak.total * copies, {kind: size * copies for kind, size in peak.kinds.items()})
        found.append(Planned(name, count, phases, limit, also * copies))
    assert first is not None, "the policy is somewhere"
    return tuple(found), first


def _hosts(run: Run, device: torch.device) -> dict[torch.device, frozenset[str]]:
    """Who is on which device, as the first rank names them. On the processor all are together; who is there while the
    policy is on a GPU takes nothing of any GPU."""
    there = checks.roles(run)
    if device.type == "cpu":
        return {device: frozenset({"policy", "engine"} | there)}
    engine = torch.device("cuda", run.ranks) if run.placement.layout == "split" else device
    hosts: dict[torch.device, set[str]] = {device: {"policy"}}
    hosts.setdefault(engine, set()).add("engine")
    for role in sorted(there):
        where = placed(run.placement, role, policy=device, engine=engine)
        if where.type != "cpu":
            hosts.setdefault(where, set()).add(role)
    return {where: frozenset(roles) for where, roles in hosts.items()}


def _named(run: Run, where: torch.device, roles: frozenset[str]) -> tuple[str, int, int]:
    """What such devices are called, how many there are, and how many ranks share one."""
    if where.type == "cpu":
        return "the processor's memory", 1, run.ranks
    if "policy" in roles:
        return "each GPU that trains" if "engine" not in roles else "each GPU", run.ranks, 1
    if "engine" in roles:
        return "each GPU that samples", run.ranks, 1
    return f"{where}, with {' and '.join(sorted(roles))}", 1, run.ranks


def _limit(asked: PlanRun, device: torch.device) -> int | None:
    if device.type == "cpu":
        return room()[0]
    if asked.gpu_gib is not None:
        return int(asked.gpu_gib * GIB)
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _own_size(device: torch.device) -> int:
    """What a process holds that has loaded the program and no model: this one, as it stands."""
    if device.type != "cpu":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _candidates(run: Run, device: torch.device) -> list[tuple[str, str, Run]]:
    """Options that could make a run smaller, each with the run that has it."""
    train, rollout = run.train, sampling(run)
    wanted: list[tuple[str, object, bool]] = [
        ("train.micro_tokens", max(train.micro_tokens // 2, 1), True),
        ("train.activation_checkpointing", True, not train.activation_checkpointing),
        ("train.offload", True, device.type == "cuda" and not train.offload),
        ("train.precision", "bf16", train.precision in ("fp32", "fp64")),
        ("rollout.kv_gib", rollout.kv_gib / 2, True),
        ("rollout.max_running", max(rollout.max_running // 2, 1), rollout.max_running > 1),
        ("sampling.max_tokens", max(run.sampling.max_tokens // 2, 1), run.sampling.max_tokens > 1),
        ("ranks", 2 * run.ranks, device.type == "cuda"),
    ]
    return [(option, _written(value), _with(run, option, value)) for option, value, applies in wanted if applies]


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _with(run: Run, option: str, value: object) -> Run:
    """The run with one option changed."""
    part, _, name = option.rpartition(".")
    if not part:
        return run.model_copy(update={name: value})
    changed = getattr(run, part).model_copy(update={name: value})
    return run.model_copy(update={part: changed})
