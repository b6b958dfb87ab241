"""Who learns from examples: one model, its loss, and what others tell of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etude.algorithms import Loss
from etude.batch import Batch
from etude.checkpoint import Checkpoint, CheckpointManager
from etude.observe import Metrics
from etude.protocols import Crew, Gather, Split, dispatch_mode
from etude.recipes.workers.policy_worker import LossObjective
from etude.recipes.workers.utilization import UtilizationMeter, count_parameters
from etude.train import FrozenModel, Learner

__all__ = ["Annotate", "SupervisedLearner", "SupervisedWorker", "annotate_with_reference", "annotate_with_teacher"]

Annotate = Callable[[Batch], Batch]
"""Adds the columns that another model tells."""


def annotate_with_reference(reference: FrozenModel) -> Annotate:
    """What a reference thinks of the tokens."""
    return lambda batch: batch.replace(ref_logp=reference.logp(batch))


def annotate_with_teacher(teacher: FrozenModel, top: int, vocabulary: int) -> Annotate:
    """What a teacher would rather have said, among the tokens that its pupil knows too."""

    def annotate(batch: Batch) -> Batch:
        ids, logp = teacher.top_tokens(batch, top, vocabulary)
        return batch.replace(teacher_topk_ids=ids, teacher_topk_logp=logp)

    return annotate


class SupervisedWorker:
    """One rank of a model that learns from examples."""

    def __init__(self, loss: Loss, learner: Learner, annotate: Annotate | None = None) -> None:
        """annotate: what others tell, where the loss asks for it."""
        self._objective, self._learner = LossObjective(loss), learner
        self._annotate: Annotate = annotate or (lambda batch: batch)
        self._meter = UtilizationMeter(learner.model.device)

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def annotate(self, batch: Batch) -> Batch:
        """The batch with what others tell of it."""
        return self._annotate(batch)

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def update(self, batch: Batch) -> Metrics:
        """One optimizer step."""
        return self._learner.update(batch, self._objective)

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def measure(self, batch: Batch) -> Metrics:
        """What the loss says of a batch that nothing is learned from."""
        return self._learner.measure(batch, self._objective, self._annotate)

    @dispatch_mode()
    def parameters(self) -> tuple[int, int]:
        """How many weights the model has, and how many of them are trained."""
        return count_parameters(self._learner.model)

    @dispatch_mode()
    def save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint, each rank its share."""
        return checkpoints.save(step, self._learner.state(), facts)

    @dispatch_mode()
    def resume(self, checkpoints: CheckpointManager, checkpoint: Checkpoint) -> None:
        """Go on from what lies on the disk, however many ranks wrote it."""
        tensors = self._learner.state()
        checkpoints.load(checkpoint, tensors)
        self._learner.restore(tensors)

    @dispatch_mode(gather=Gather.METRICS)
    def utilization(self) -> Metrics:
        """How busy the device was since this was last asked."""
        return self._meter.read()


@dataclass(frozen=True)
class SupervisedLearner:
    """The model that learns, as the loop speaks to it."""

    crew: Crew

    def annotate(self, batch: Batch) -> Batch:
        """The batch with what others tell of it."""
        return self.crew.call(SupervisedWorker.annotate, batch)

    def update(self, batch: Batch) -> Metrics:
        """One optimizer step."""
        return self.crew.call(SupervisedWorker.update, batch)

    def measure(self, batch: Batch) -> Metrics:
        """What the loss says of a batch that nothing is learned from."""
        return self.crew.call(SupervisedWorker.measure, batch)

    def parameters(self) -> tuple[int, int]:
        """How many weights it has, and how many of them are trained."""
        return self.crew.call(SupervisedWorker.parameters)

    def facts(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of it in plain numbers: nothing that its tensors do not tell."""
        return {}

    def save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint of it."""
        return self.crew.call(SupervisedWorker.save, checkpoints, step, facts)

    def resume(self, checkpoints: CheckpointManager, checkpoint: Checkpoint) -> None:
        """Go on from one."""
        self.crew.call(SupervisedWorker.resume, checkpoints, checkpoint)

    def utilization(self) -> Metrics:
        """How busy the device was since this was last asked."""
        return self.crew.call(SupervisedWorker.utilization)
