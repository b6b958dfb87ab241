"""The policy of a tiny model on every rank of a crew, made anew for each thing that is tried of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from etude.algorithms import Algorithm
from etude.algorithms.losses.supervised import SFT
from etude.batch import Batch
from etude.checkpoint import Checkpoint, Checkpoints
from etude.observe import Metrics
from etude.protocols import Gather, Split, spread
from etude.recipes.checks import BY_THE_MODEL
from etude.recipes.workers import PolicyWorker
from etude.train import Learner, Train
from etude.train.optim import Masters
from etude.train.ranks import of_group
from tests.train.tasks import Imitate, model


class Pupil:
    """One rank."""

    def __init__(self) -> None:
        self.begin()

    @spread()
    def begin(
        self, precision: str = "fp64", algorithm: Algorithm | None = None, epochs: int = 1, **options: Any
    ) -> None:
        """A policy that has learned nothing yet; the rate is high enough to see."""
        config = Train(precision=precision, **{"learning_rate": 1e-2, "clip": 0.5, **options})
        self.learner = Learner(model(precision), config, steps=20, peak=1e12)
        self.worker = PolicyWorker(algorithm or Algorithm(), self.learner, seed=0, epochs=epochs)
        self.wanted = (algorithm or Algorithm()).needs() & BY_THE_MODEL | {"old_logp"}
        self.step = 0

    @spread(Split.GROUPS, Gather.CONCAT)
    def ready(self, batch: Batch) -> Batch:
        """Annotated and estimated."""
        batch = self.worker.annotate(batch, self.wanted)
        self.step += 1
        return self.worker.estimate(batch, self.step)

    @spread(Split.GROUPS, Gather.METRICS)
    def update(self, parts: list[Batch]) -> Metrics:
        """A step on each of them."""
        return self.worker.update(parts)

    @spread(Split.GROUPS, Gather.METRICS)
    def imitate(self, batch: Batch, seen: int | None = None) -> Metrics:
        """A step of supervised learning, from so many of the actions."""
        action = batch.action & (batch.action.cumsum(0) <= (batch.tokens if seen is None else seen))
        return self.learner.update(batch.replace(action=action), Imitate(SFT()))

    @spread(gather=Gather.ALL)
    def weights(self) -> list[dict[str, Tensor]]:
        """What every rank computes with."""
        return {name: weight.clone() for name, weight in self.learner.weights()}  # type: ignore[return-value]

    @spread(gather=Gather.ALL)
    def kept(self) -> list[int]:
        """How many numbers each rank keeps of the masters."""
        masters = self.learner.state()["weights"]
        assert isinstance(masters, Mapping)
        return sum(_local(each).numel() for each in masters.values())  # type: ignore[return-value]

    @spread()
    def save(self, checkpoints: Checkpoints, step: int) -> Checkpoint:
        """Write a checkpoint."""
        return self.worker.save(checkpoints, step, {"learner": self.worker.facts()})

    @spread()
    def resume(self, directory: Path) -> None:
        """Go on from the newest one."""
        checkpoints = Checkpoints(directory)
        newest = checkpoints.newest()
        assert newest is not None
        self.worker.resume(checkpoints, newest)

    @spread(gather=Gather.ALL)
    def spent(self, megabytes: int, bucket: int) -> list[dict[str, float]]:
        """What exchanging the gradients and the weights of so large a model took at most, beside what was there, in
        buckets."""
        rows = megabytes * 2**20 // 4 // 1024
        leaves = {
            "large": nn.Parameter(torch.ones(rows // 2, 1024)),
            **{f"small.{i}": nn.Parameter(torch.ones(rows // 40, 1024)) for i in range(20)},
        }
        masters = Masters(leaves.items(), Train(precision="fp32"), ranks=of_group(), bucket=bucket)
        found = {}
        for leaf in leaves.values():
            leaf.grad = torch.ones_like(leaf)
        for weight in masters._weights.values():
            weight.grad = torch.ones_like(weight)
        found["gradients"] = _peak(masters.gather) / bucket
        found["weights"] = _peak(masters.refresh) / bucket
        return found  # type: ignore[return-value]


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _peak(act: Any) -> int:
    """How far the process's memory rises while this is done, in bytes, as the system counts it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
