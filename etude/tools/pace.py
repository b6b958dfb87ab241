"""How long a step would take at best: the operations that it asks for, over what a device was measured to do.

Estimates, and marked as such wherever they are shown. The rates are of the best product of matrices and of the best
copy; a run reaches a part of them, and its metric `mfu` tells which part. What agents, environments and rewards take
is not in them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from etude.data.pack import tree
from etude.recipes import checks
from etude.recipes.recipe import Recipe
from etude.recipes.run import Run
from etude.recipes.supervised import Supervised
from etude.rollout import ServerConfig
from etude.tools.lesson import examples
from etude.tools.rehearsal import batch_of
from etude.tools.rehearsed import Rehearsed
from etude.train import matmul_rate
from etude.train.cost import Cost
from etude.train.optim import PRECISIONS

__all__ = ["Pace", "copy_rate", "pace"]

COPIED = 2**26
"""Bytes that are copied to measure how fast: more than a processor's cache holds."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a step at best, by what they are spent on; and the rates that they were taken from."""

    sampling: float
    asking: float
    updating: float
    operations: float
    """A second."""
    bytes: float
    """A second, read."""

    @property
    def step(self) -> float:
        """All of it."""
        return self.sampling + self.asking + self.updating


def pace(run: Recipe, device: torch.device, played: Rehearsed, tflops: float | None, gbs: float | None) -> Pace | None:
    """The pace of a run, by rates that are given, or measured where such a device is here; else nothing is said."""
    there = device.type == "cpu" or torch.cuda.is_available()
    if not there and (tflops is None or gbs is None):
        return None
    dtype = PRECISIONS[run.train.precision]
    given = device.type == "cuda" and tflops is not None, device.type == "cuda" and gbs is not None
    operations = 1e12 * (tflops or 0) if given[0] else matmul_rate(dtype, device, 1024, 0.2)
    read = 1e9 * (gbs or 0) if given[1] else copy_rate(device)
    if isinstance(run, Supervised):
        return _of_examples(run, played, operations, read)
    assert isinstance(run, Run), "every recipe is one or the other"
    model, cost = played.model, Cost.of(played.model)
    all_of_it = run.collect.tasks * run.collect.group_size
    rollouts = -(-all_of_it // run.ranks)
    size = min(run.collect.group_size, rollouts)
    group = batch_of(run, played.row).select(list(range(size)))
    pack, judged, groups = tree(group), int(group.action.sum()), rollouts / size
    forward = cost.forward(pack, judged)
    passes = len(checks.from_the_models(run))
    engines, width = run.ranks, 1
    if isinstance(run.rollout, ServerConfig):
        engines, width = len(run.rollout.url) or run.rollout.replicas, run.rollout.tensor_parallel
    answer = played.row[1]
    weights = sum(weight.nbytes for weight in model.parameters())
    held = (played.row[0] + played.row[1] / 2) * model.layers * 2 * model.kv_heads * model.head_dim * dtype.itemsize
    each = -(-all_of_it // engines)
    at_once = min(played.at_once, max(1, played.held // sum(played.row))) if played.held else played.at_once
    moved = (-(-each // at_once) * answer * weights + each * answer * held) / width
    return Pace(
        sampling=max(each / size * forward / width / operations, moved / read),
        asking=passes * groups * forward / operations,
        updating=run.epochs * groups * cost.update(pack, judged) / operations,
        operations=operations,
        bytes=read,
    )


def _of_examples(run: Supervised, played: Rehearsed, operations: float, read: float) -> Pace:
    """That of a run which learns from examples."""
    one, cost = examples(run, sum(played.row), 1), Cost.of(played.model)
    pack, judged, mine = tree(one), int(one.action.sum()), run.batch_size / run.ranks
    asked = played.ledger.phases.count("asking")
    return Pace(
        sampling=0.0,
        asking=asked * mine * cost.forward(pack, judged) / operations,
        updating=mine * cost.update(pack, judged) / operations,
        operations=operations,
        bytes=read,
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
