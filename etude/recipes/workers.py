"""What runs on a rank: the policy's learner, the algorithm that it learns by, and the engine that samples from it.

The controller speaks to these through a crew. Token columns come in and go out as batches; numbers come out as metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from torch import Tensor

from etude.algorithms import Algorithm, Denominators, LossValue, Outputs, State
from etude.batch import Batch
from etude.checkpoint import Checkpoint, Checkpoints
from etude.observe import Last, Metrics, Sum
from etude.protocols import Gather, Ids, Split, spread
from etude.recipes.meter import Meter
from etude.records import Completion, SamplingParams
from etude.rollout import TorchEngine
from etude.rollout.team import dismiss_team
from etude.sync import LocalCarrier
from etude.train import Frozen, Learner
from etude.train.ranks import count, of_group

__all__ = ["Improve", "PolicyWorker"]


class Improve:
    """What a policy's update minimises: the run's algorithm, under the state that its batch was estimated in."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.state = State()

    @property
    def split_unit(self) -> Literal["rollout", "group"]:
        """What must stay in one micro-batch."""
        return self._algorithm.loss.split_unit

    def needs(self) -> frozenset[str]:
        """The batch columns it reads."""
        return self._algorithm.needs()

    def outputs(self) -> frozenset[str]:
        """What the forward pass must compute."""
        return self._algorithm.outputs()

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        """This micro-batch's share."""
        return self._algorithm.objective(batch, outputs, whole, self.state)


class PolicyWorker:
    """One rank of the policy: annotates, estimates, updates. The statistics of a batch go through its `Ranks`."""

    def __init__(
        self,
        algorithm: Algorithm,
        learner: Learner,
        *,
        seed: int,
        epochs: int,
        reference: Frozen | None = None,
        engine: TorchEngine | None = None,
    ) -> None:
        """reference: what the policy is held to, where the algorithm compares the two. engine: what samples from the
        learner's model."""
        self._algorithm, self._learner, self._reference, self._engine = algorithm, learner, reference, engine
        self._seed, self._epochs, self._ranks = seed, epochs, of_group()
        self._meter = Meter(learner.model.device)
        self._objective = Improve(algorithm)
        self._following = State()
        self._estimated = Metrics()

    @spread(Split.GROUPS, Gather.CONCAT)
    def annotate(self, batch: Batch, columns: frozenset[str]) -> Batch:
        """The batch with the columns that only the models can tell."""
        if "ref_logp" in columns:
            assert self._reference is not None, "a run that compares with a reference has one"
            batch = batch.replace(ref_logp=self._reference.logp(batch))
        own = columns - {"ref_logp"}
        return self._learner.annotate(batch, own) if own else batch

    @spread(Split.GROUPS, Gather.CONCAT)
    def estimate(self, batch: Batch, step: int) -> Batch:
        """The batch with advantages, weights and masks."""
        found = self._algorithm.estimate(batch, self._following, seed=self._seed, step=step, ranks=self._ranks)
        self._objective.state, self._following = found.state, found.following
        self._estimated = found.metrics
        return found.batch

    @spread(Split.GROUPS, Gather.METRICS)
    def update(self, parts: Sequence[Batch]) -> Metrics:
        """An optimizer step on each of these update batches, in every epoch, and what was seen since the last ones."""
        metrics, self._estimated = self._estimated, Metrics()
        before = self._learner.version
        for _ in range(self._epochs):
            for part in parts:
                metrics.merge(self._learner.update(part, self._objective))
        metrics.add("optimizer_steps", Last.of(self._learner.version - before))
        return metrics

    @spread()
    def parameters(self) -> int:
        """How many numbers the model is."""
        return sum(weight.numel() for weight in self._learner.model.parameters())

    @spread()
    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights by their published names."""
        return self._learner.weights()

    @spread()
    def tensors(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of this rank in tensors."""
        return self._learner.state()

    @spread()
    def facts(self) -> Mapping[str, Any]:
        """What a checkpoint keeps in plain numbers: the algorithm's own state."""
        return asdict(self._following)

    @spread()
    def restore(self, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._learner.restore(tensors)
        means = {int(role): mean for role, mean in facts["role_means"].items()}
        self._following = State(facts["kl_value"], means)

    @spread()
    def save(self, checkpoints: Checkpoints, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint, each rank its share."""
        return checkpoints.save(step, self.tensors(), facts)

    @spread()
    def resume(self, checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
        """Go on from what lies on the disk, however many ranks wrote it."""
        tensors = self.tensors()
        checkpoints.load(checkpoint, tensors)
        self.restore(tensors, checkpoint.facts["learner"])

    # -- sampling -------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Ids, sampling: SamplingParams, *, begun: Callable[[], None]) -> Completion:
        """Answer one question by this rank's engine."""
        return await self._hosted.generate(prompt, sampling, begun=begun)

    @spread()
    def publish(self, version: int) -> Metrics:
        """Have the engine compute with the learner's weights, under a new version; what that cost, on each rank."""
        told = asyncio.run(LocalCarrier(self._hosted).publish(self.weights(), version))
        dismiss_team()
        return told

    @spread(gather=Gather.METRICS)
    def sampled(self) -> Metrics:
        """What the engine did since this was last asked. It is busy beside those of the other ranks."""
        seen = dict(self._hosted.stats())
        seen["engine/busy_seconds"] = Sum.of((seen["engine/busy_seconds"].value() or 0.0) / count(self._ranks))
        return Metrics(seen)

    @spread(gather=Gather.METRICS)
    def utilisation(self) -> Metrics:
        """How busy the device was since this was last asked."""
        return self._meter.read()

    @property
    def _hosted(self) -> TorchEngine:
        assert self._engine is not None, "a worker that samples has an engine"
        return self._engine
