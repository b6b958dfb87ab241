"""The memory of a run that samples while it trains: `max_staleness` above 0.

Engine and trainer compute at the same time. On a device that they share, the working memory of both is taken at once.
Each has its own weights in any case. The rollouts of later steps wait in the processor's memory until their step
trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.tools.plan.memory_trace import PeakMemory
from etude.tools.plan.results import GIB

WAITING = "waiting rollouts"
"""The kind of memory of rollouts that wait."""
TOKEN_BYTES = 17
"""Bytes of a token that waits: id, log-prob, version and turn of 4 bytes each, and whether the model wrote it."""
WORKING = ("activations", "logits")
"""The kinds of memory that an engine needs while it computes, and not between two steps of it."""


def waiting_bytes(run: Recipe, row: tuple[int, int]) -> int:
    """Return the most bytes of rollouts that wait; 0 without staleness. row: the longest prompt and answer."""
    if not isinstance(run, Run) or not run.max_staleness:
        return 0
    rollouts = (run.max_staleness + 1) * run.collect.tasks * run.collect.group_size
    return rollouts * sum(row) * TOKEN_BYTES


def engine_activations(run: Recipe, roles: frozenset[str], phases: Mapping[str, PeakMemory]) -> Mapping[str, int]:
    """Return what the engine needs during the other phases, by kind: nothing where it does not compute then."""
    if not isinstance(run, Run) or not run.max_staleness or not {"policy", "engine"} <= roles:
        return {}
    return {kind: phases["sampling"].kinds[kind] for kind in WORKING if kind in phases["sampling"].kinds}


def add_to_phases(
    phases: Mapping[str, PeakMemory], added: Mapping[str, int], *, but: str = ""
) -> dict[str, PeakMemory]:
    """Return the phases with this memory in each, by kind. but: a phase that has it already."""
    more = Counter(added)
    return {
        name: peak if name == but else PeakMemory(peak.total + more.total(), dict(Counter(peak.kinds) + more))
        for name, peak in phases.items()
    }


def describe_waiting(run: Recipe, size: int) -> str:
    """Return a sentence about rollouts that wait, for a plan of GPUs."""
    where = "Ray's object store" if run.cluster == "ray" else "the processor's memory"
    return f"Rollouts that wait for their step take up to {size / GIB:.3g} GiB of {where} (`max_staleness`)."
