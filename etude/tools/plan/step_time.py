"""How long a step would take at best: the operations that it asks for, over what a device was measured to do.

Estimates, and marked as such wherever they are shown. The rates are of the best product of matrices and of the best
copy; a run reaches a part of them, and its metric `mfu` tells which part. What agents, environments and rewards take
is not in them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from etude.data.pack import pack_prefix_tree
from etude.recipes.recipe import Recipe
from etude.recipes.run import checks
from etude.recipes.run.config import Run
from etude.recipes.supervised.config import SupervisedRun
from etude.rollout import ServerConfig
from etude.tools.plan.dry_run import worst_case_batch
from etude.tools.plan.dry_run_common import DryRunResult
from etude.tools.plan.supervised_dry_run import worst_case_examples
from etude.train import measure_matmul_flops
from etude.train.flops import ModelFlops
from etude.train.optim import PRECISIONS

__all__ = ["StepTime", "copy_rate", "estimate_step_time"]

COPIED = 2**26
"""Bytes that are copied to measure how fast: more than a processor's cache holds."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step at best, by what they are spent on; and the rates that they were taken from."""

    sampling: float
    annotating: float
    updating: float
    flops_per_second: float
    """A second."""
    bytes_per_second: float
    """A second, read."""

    @property
    def step(self) -> float:
        """All of it."""
        return self.sampling + self.annotating + self.updating


def estimate_step_time(
    run: Recipe, device: torch.device, dry_run: DryRunResult, tflops: float | None, gbs: float | None
) -> StepTime | None:
    """The pace of a run, by rates that are given, or measured where such a device is here; else nothing is said."""
    there = device.type == "cpu" or torch.cuda.is_available()
    if not there and (tflops is None or gbs is None):
        return None
    dtype = PRECISIONS[run.train.precision]
    given = device.type == "cuda" and tflops is not None, device.type == "cuda" and gbs is not None
    operations = 1e12 * (tflops or 0) if given[0] else measure_matmul_flops(dtype, device, 1024, 0.2)
    read = 1e9 * (gbs or 0) if given[1] else copy_rate(device)
    if isinstance(run, SupervisedRun):
        return _supervised_step_time(run, dry_run, operations, read)
    assert isinstance(run, Run), "every recipe is one or the other"
    model, cost = dry_run.model, ModelFlops.from_model(dry_run.model)
    all_of_it = run.collect.tasks * run.collect.group_size
    rollouts = -(-all_of_it // run.ranks)
    size = min(run.collect.group_size, rollouts)
    group = worst_case_batch(run, dry_run.row).select(list(range(size)))
    pack, judged, groups = pack_prefix_tree(group), int(group.action.sum()), rollouts / size
    forward = cost.forward(pack, judged)
    passes = len(checks.model_columns(run))
    engines, width = run.ranks, 1
    if isinstance(run.rollout, ServerConfig):
        engines, width = len(run.rollout.url) or run.rollout.replicas, run.rollout.tensor_parallel
    answer = dry_run.row[1]
    weights = sum(weight.nbytes for weight in model.parameters())
    held = (
        (dry_run.row[0] + dry_run.row[1] / 2) * model.num_layers * 2 * model.kv_heads * model.head_dim * dtype.itemsize
    )
    each = -(-all_of_it // engines)
    at_once = (
        min(dry_run.max_concurrency, max(1, dry_run.held // sum(dry_run.row)))
        if dry_run.held
        else dry_run.max_concurrency
    )
    moved = (-(-each // at_once) * answer * weights + each * answer * held) / width
    return StepTime(
        sampling=max(each / size * forward / width / operations, moved / read),
        annotating=passes * groups * forward / operations,
        updating=run.ppo_epochs * groups * cost.update(pack, judged) / operations,
        flops_per_second=operations,
        bytes_per_second=read,
    )


def _supervised_step_time(run: SupervisedRun, dry_run: DryRunResult, operations: float, read: float) -> StepTime:
    """That of a run which learns from examples."""
    one, cost = worst_case_examples(run, sum(dry_run.row), 1), ModelFlops.from_model(dry_run.model)
    pack, judged, mine = pack_prefix_tree(one), int(one.action.sum()), run.batch_size / run.ranks
    asked = dry_run.tracker.phases.count("annotating")
    return StepTime(
        sampling=0.0,
        annotating=asked * mine * cost.forward(pack, judged) / operations,
        updating=mine * cost.update(pack, judged) / operations,
        flops_per_second=operations,
        bytes_per_second=read,
    )


def copy_rate(device: torch.device, seconds: float = 0.2) -> float:
    """Bytes a second that a device reads, in the best of some copies of much memory; as many are written."""
    a = torch.zeros(COPIED // 4, device=device)
    b, best, until = torch.empty_like(a), float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        begun = _now(device)
        b.copy_(a)
        best = min(best, _now(device) - begun)
    return 2 * COPIED / best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
