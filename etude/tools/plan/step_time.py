"""The lower bound of a step's time: its operations and bytes, divided by the measured rates of the device.

These are estimates, and printed as such. The rates are those of the best matrix product and of the best copy. A run
reaches a part of them, which its metric `mfu` reports. The time of agents, environments and rewards is not included.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from etude.data.pack import pack_prefix_tree
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.supervised.config import SupervisedRun
from etude.rollout import ServerConfig
from etude.tools.plan.dry_run import worst_case_group
from etude.tools.plan.dry_run_common import DryRunResult
from etude.tools.plan.supervised_dry_run import worst_case_examples
from etude.train import measure_matmul_flops
from etude.train.flops import ModelFlops, weight_bytes_read
from etude.train.optim import PRECISIONS

COPIED = 2**26
"""Bytes of the copy that measures bandwidth: more than a processor's cache."""


@dataclass(frozen=True)
class StepTime:
    """The least seconds of a step, by phase, and the rates that they were computed from."""

    sampling: float
    annotating: float
    updating: float
    flops_per_second: float
    """Floating-point operations per second."""
    bytes_per_second: float
    """Bytes read per second."""
    overlaps: bool = False
    """True if the next step is sampled on other devices while this one trains."""

    @property
    def step(self) -> float:
        """The whole step."""
        training = self.annotating + self.updating
        return max(self.sampling, training) if self.overlaps else self.sampling + training


def estimate_step_time(
    run: Recipe, device: torch.device, dry_run: DryRunResult, tflops: float | None, gbs: float | None
) -> StepTime | None:
    """Estimate the step time of a run. Rates are given, or measured on this machine; without them return None."""
    measurable = device.type == "cpu" or torch.cuda.is_available()
    if not measurable and (tflops is None or gbs is None):
        return None
    dtype = PRECISIONS[run.train.precision]
    tflops, gbs = (tflops, gbs) if device.type == "cuda" else (None, None)
    flops_rate = measure_matmul_flops(dtype, device, 1024, 0.2) if tflops is None else 1e12 * tflops
    read_rate = copy_rate(device) if gbs is None else 1e9 * gbs
    if isinstance(run, SupervisedRun):
        return _supervised_step_time(run, dry_run, flops_rate, read_rate)
    assert isinstance(run, Run), "every recipe is one or the other"
    model, cost = dry_run.model, ModelFlops.from_model(dry_run.model)
    all_rollouts = run.collect.tasks * run.collect.group_size
    rollouts = -(-all_rollouts // run.ranks)
    group = worst_case_group(run, dry_run.row)
    size = group.num_rollouts
    pack = pack_prefix_tree(group)
    predicted = int(group.action.sum())
    groups = rollouts / size
    forward = cost.forward(pack, predicted)
    columns = run.model_columns()
    passes = max(len(columns - {"routes"}), int("routes" in columns))
    engines, width = run.ranks, 1
    if served := isinstance(run.rollout, ServerConfig):
        engines, width = len(run.rollout.url) or run.rollout.replicas, run.rollout.tensor_parallel
    prompt, answer = dry_run.row
    context_bytes = (prompt + answer / 2) * model.kv_values_per_token * dtype.itemsize + 2 * model.state_bytes
    per_engine, concurrency = -(-all_rollouts // engines), dry_run.max_concurrency
    if dry_run.kv_tokens:
        concurrency = min(concurrency, max(1, dry_run.kv_tokens // (prompt + answer)))
    steps, weights = -(-per_engine // concurrency) * answer, weight_bytes_read(model, concurrency)
    bytes_read = (steps * weights + per_engine * answer * context_bytes) / width
    return StepTime(
        sampling=max(per_engine / size * forward / width / flops_rate, bytes_read / read_rate),
        annotating=passes * groups * forward / flops_rate,
        updating=run.ppo_epochs * groups * cost.update(pack, predicted) / flops_rate,
        flops_per_second=flops_rate,
        bytes_per_second=read_rate,
        overlaps=run.max_staleness > 0 and device.type == "cuda" and (served or run.placement.layout == "split"),
    )


def _supervised_step_time(run: SupervisedRun, dry_run: DryRunResult, flops_rate: float, read_rate: float) -> StepTime:
    example, cost = worst_case_examples(run, sum(dry_run.row), 1), ModelFlops.from_model(dry_run.model)
    pack = pack_prefix_tree(example)
    predicted = int(example.action.sum())
    examples = run.batch_size / run.ranks
    passes = dry_run.memory.phases.count("annotating")
    return StepTime(
        sampling=0.0,
        annotating=passes * examples * cost.forward(pack, predicted) / flops_rate,
        updating=examples * cost.update(pack, predicted) / flops_rate,
        flops_per_second=flops_rate,
        bytes_per_second=read_rate,
    )


def copy_rate(device: torch.device) -> float:
    """Measure the bytes per second of a device, in the best of several large copies; reads and writes both count."""
    a = torch.zeros(COPIED // 4, device=device)
    b = torch.empty_like(a)
    best = float("inf")
    deadline = time.perf_counter() + 0.2
    while time.perf_counter() < deadline:
        start = _now(device)
        b.copy_(a)
        best = min(best, _now(device) - start)
    return 2 * COPIED / best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
