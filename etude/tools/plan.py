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
from etude.recipes.run import Run
from etude.tools.doctor.machine import room
from etude.tools.ledger import Peak
from etude.tools.pace import Pace, pace
from etude.tools.rehearsal import AT_REST, Rehearsed, rehearse

__all__ = ["GIB", "Knob", "Plan", "PlanRun", "Planned", "plan", "tree"]

GIB = 2**30


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
    """An option, set to something else, and what the device would hold then."""

    option: str
    value: str
    total: int


@dataclass(frozen=True)
class Plan:
    """What was found."""

    device: Planned
    count: int
    """How many of them the run has."""
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


def plan(asked: PlanRun, *, knobs: bool = True, tell: Callable[[str], None] = lambda _: None) -> Plan:
    """Rehearse a run, and what would make it smaller. tell: hears what is under way."""
    run, device, count = _settled(asked)
    tell("the run as it is asked for")
    base = _own_size(device)
    played = rehearse(run, device)
    found = _planned(run, device, played, _limit(asked, device), base)
    turned = []
    for option, value, changed in _candidates(run, device) if knobs else ():
        tell(f"{option}={value}")
        try:
            other = _planned(changed, device, rehearse(changed, device), None, base)
        except EtudeError:  # such a run would be refused, and is no way out
            continue
        turned.append(Knob(option, value, other.total))
    return Plan(
        device=found,
        count=count,
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
    device = plan.device
    told = {"total": device.total, "fits": device.fits, "worst": device.worst}
    return {**asdict(plan), "device": {**asdict(device), **told}}


def _settled(asked: PlanRun) -> tuple[Run, torch.device, int]:
    """The run with as many ranks as there are GPUs for, what each computes on, and how many of those there are."""
    if asked.model.path is None:
        raise ConfigError("A plan is of a model: give its directory with `model.path=…`; its weights are not read.")
    check_model(asked.model.path)
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = here if asked.gpus is None and asked.device != "cpu" else asked.gpus or 0
    if asked.device == "cpu" and gpus:
        raise ConfigError(f"`gpus={gpus}` plans for GPUs, and `device=cpu` computes on the processor. Leave one out.")
    if gpus and asked.ranks > gpus:
        raise ConfigError(
            f"`ranks={asked.ranks}` want a GPU each, and the plan is for `gpus={gpus}`: {asked.ranks} > {gpus}. Lower "
            f"`ranks`, or ask for more GPUs."
        )
    given = {name: getattr(asked, name) for name in Run.model_fields}
    ranks = gpus if asked.ranks == 1 and gpus > 1 else asked.ranks
    run = Run.model_construct(**(given | {"ranks": ranks}))
    checks.algorithm(run)
    if run.train.offload and not gpus:
        raise ConfigError(
            "`train.offload` makes room on a GPU, and this plan has none. Leave it out, or give `gpus=…`."
        )
    return run, torch.device("cuda", 0) if gpus else torch.device("cpu"), ranks if gpus else 1


def _planned(run: Run, device: torch.device, played: Rehearsed, limit: int | None, also: int) -> Planned:
    """A device with all that it holds; of the processor, with what all ranks hold in its one memory."""
    here = run.ranks if device.type == "cpu" else 1
    phases = {}
    for name in played.ledger.phases:
        away = AT_REST if run.train.offload and name == "sampling" else frozenset[str]()
        peak = played.ledger.peak(name, away)
        phases[name] = Peak(peak.total * here, {kind: size * here for kind, size in peak.kinds.items()})
    named = "the processor's memory" if device.type == "cpu" else "each GPU"
    return Planned(named, phases, limit, also * here)


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
    train, rollout = run.train, run.rollout
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
