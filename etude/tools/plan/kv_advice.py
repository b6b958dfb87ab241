"""The `rollout.kv_gib` that a GPU has room for, from a plan with another one."""

from __future__ import annotations

import torch

from etude.recipes.recipe import Recipe
from etude.rollout.kv_budget import KvBudget
from etude.rollout.kv_cache import block_bytes, count_slots, kv_gib
from etude.tools.plan.dry_run_common import DryRunResult
from etude.tools.plan.results import GIB, DeviceMemory

NOTABLE = 1.25
"""A larger cache is advised from so many times the planned one on."""


def kv_budget(run: Recipe, memory: DeviceMemory, result: DryRunResult) -> KvBudget | None:
    """Return the budget on a GPU with an embedded engine; None elsewhere.

    With `train.offload` the engine sleeps in an update, whose peak has no keys and values, and does not count.
    """
    engine = run.embedded_engine
    with_cache = {phase: peak for phase, peak in memory.phases.items() if peak.kinds.get("kv")}
    if engine is None or memory.limit is None or not with_cache:
        return None
    planned = {phase: peak.total - peak.kinds["kv"] for phase, peak in with_cache.items()}
    fullest = max(planned, key=lambda phase: planned[phase])
    blocks = result.max_concurrency * -(-sum(result.row) // engine.block_size)
    states = result.model.state_bytes * count_slots(engine.max_num_seqs)
    useful = blocks * block_bytes(result.model, engine.block_size) + states
    return KvBudget(memory.limit, planned[fullest], fullest, useful)


def advise_kv(run: Recipe, device: torch.device, memory: DeviceMemory, result: DryRunResult) -> tuple[str, ...]:
    """Return a sentence if the cache could be notably larger, or must be smaller to fit."""
    budget = kv_budget(run, memory, result) if device.type == "cuda" else None
    if budget is None or run.embedded_engine is None:
        return ()
    held = kv_gib(device, run.embedded_engine) * GIB
    if not budget.size:
        return (f"Nothing is left for keys and values: {budget.describe()}.",)
    advised = int(budget.size / GIB * 1000) / 1000
    if advised and (budget.size >= NOTABLE * held or (budget.size < held and not memory.fits)):
        return (f"`rollout.kv_gib={advised:g}` is what this GPU has room for: {budget.describe()}.",)
    return ()
