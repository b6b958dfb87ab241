"""A rank of `bench.train_engines`, in its own process: an engine of Etude, or plain transformers under FSDP2.

It reads lines of JSON. The first describes the rank; the answer has the seconds of each phase of the start. Every
further line names a case, of which the rank trains its share in one optimizer step; the answer has its loss.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from etude.algorithms import Denominators, LossValue, Outputs
from etude.batch import Batch
from etude.models import load
from etude.observe import Metrics
from etude.records import Rollout, Sample
from etude.train import Learner, TrainConfig

LEARNING_RATE = 1e-5
MICRO = 8
"""Rows of a padded micro-batch."""

Row = dict[str, Any]
"""A row: `ids`, the number of `prompt` tokens, its `group`, its `advantage`, and the answer tokens of the `whole` case.
"""
StepFn = Callable[[], float]


class PolicyGradient:
    """The objective −log π · advantage, as a mean over answer tokens."""

    split_unit: Literal["rollout", "group"] = "rollout"

    def required_columns(self) -> frozenset[str]:
        """Return the batch columns that it reads."""
        return frozenset({"advantage"})

    def forward_outputs(self) -> frozenset[str]:
        """Return the outputs that it reads."""
        return frozenset({"logp"})

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        """Return the share of a micro-batch."""
        assert outputs.logp is not None
        terms = outputs.logp[batch.action] * batch.require("advantage")[batch.action]
        return LossValue(-terms.sum() / whole.tokens, Metrics())


def batch_of(rows: list[Row]) -> Batch:
    """Return these rows as a batch of a learner."""
    samples, rollouts = [], []
    for index, row in enumerate(rows):
        ids = np.array(row["ids"], np.int32)
        none = np.zeros(len(ids), np.int32)
        action = np.arange(len(ids)) >= row["prompt"]
        samples.append(Sample(ids, action, np.full(len(ids), -1, np.float32), none, none, index))
        rollouts.append(Rollout(index, row["group"], row["group"], row["advantage"]))
    advantage = torch.cat([torch.full((len(row["ids"]),), row["advantage"]) for row in rows])
    return Batch.from_records(samples, rollouts).replace(advantage=advantage)


def engine_steps(specification: dict[str, Any], lap: Callable[[str], None]) -> dict[str, StepFn]:
    """Return a step of each case with an engine of Etude."""
    config = TrainConfig(precision=specification["precision"], learning_rate=LEARNING_RATE, max_grad_norm=None)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[specification["precision"]]
    directory = Path(specification["directory"])
    model: Any
    if specification["engine"] == "local":
        model = load(directory, dtype=dtype, keep_float32=True)
    else:
        from etude.train.config import MeshConfig
        from etude.train.device_mesh import build_mesh
        from etude.train.sharded_loading import load_sharded

        mesh = build_mesh(MeshConfig(tensor=specification["tensor"]), "cpu")
        lap("mesh")
        model = load_sharded(directory, mesh, dtype=dtype)
    lap("loading")
    learner, objective = Learner(model, config), PolicyGradient()
    lap("optimizer")

    def step_of(rows: list[Row]) -> StepFn:
        batch = batch_of(rows)
        return lambda: float(learner.update(batch, objective).reduce()["loss"])

    return {name: step_of(rows) for name, rows in specification["cases"].items()}


def plain_steps(specification: dict[str, Any], lap: Callable[[str], None]) -> dict[str, StepFn]:
    """Return a step of each case with transformers' model in FSDP2 groups, on padded rows.

    FSDP2 averages gradients over ranks, so the loss is multiplied by their number.
    """
    module = AutoModelForCausalLM.from_pretrained(
        specification["directory"], dtype=torch.float32, attn_implementation="sdpa"
    )
    mesh = init_device_mesh("cpu", (specification["ranks"],))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    lap("loading")
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step_of(rows: list[Row]) -> StepFn:
        def step() -> float:
            summed = 0.0
            for first in range(0, len(rows), MICRO):
                loss = padded_loss(module, rows[first : first + MICRO])
                (loss * specification["ranks"]).backward()  # type: ignore[no-untyped-call]
                summed += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return summed

        return step

    return {name: step_of(rows) for name, rows in specification["cases"].items()}


def padded_loss(module: nn.Module, rows: list[Row]) -> Tensor:
    """Return the share of a micro-batch: padded to its longest row, by cross entropy over all logits."""
    longest = max(len(row["ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    seen, weight = torch.zeros_like(ids), torch.zeros(len(rows), longest)
    for place, row in enumerate(rows):
        length = len(row["ids"])
        ids[place, :length], seen[place, :length] = torch.tensor(row["ids"]), 1
        weight[place, row["prompt"] : length] = row["advantage"]
    logits = module(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return (losses * weight[:, 1:].flatten()).sum() / rows[0]["whole"]


def main() -> None:
    """Answer input lines until the input ends."""
    specification: dict[str, Any] = json.loads(sys.stdin.readline())
    seconds, before = {"imports": time.time() - specification["launched"]}, time.perf_counter()
    torch.set_num_threads(1)

    def lap(phase: str) -> None:
        nonlocal before
        now = time.perf_counter()
        seconds[phase], before = now - before, now

    if specification["engine"] != "local":
        store = dist.FileStore(specification["store"], specification["ranks"])
        dist.init_process_group(
            "gloo",
            store=store,
            rank=specification["rank"],
            world_size=specification["ranks"],
            timeout=timedelta(seconds=300),
        )
        lap("process group")
    steps = (plain_steps if specification["engine"] == "plain" else engine_steps)(specification, lap)
    print(json.dumps({"seconds": seconds}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"loss": steps[json.loads(line)["case"]]()}), flush=True)


if __name__ == "__main__":
    main()
