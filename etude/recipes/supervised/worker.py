"""The worker of a supervised run: one model, its loss, and the columns that an auxiliary model adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etude.algorithms import Loss
from etude.batch import Batch
from etude.checkpoint import BackgroundSaver, Checkpoint, CheckpointManager
from etude.observe import Metrics
from etude.protocols import Crew, Gather, Split, dispatch_mode
from etude.recipes.workers.policy_worker import LossObjective
from etude.recipes.workers.utilization import UtilizationMeter, count_parameters
from etude.train import FrozenModel, Learner

__all__ = ["Annotate", "SupervisedLearner", "SupervisedWorker", "annotate_with_reference", "annotate_with_teacher"]

Annotate = Callable[[Batch], Batch]
"""Adds the columns that another model computes."""


def annotate_with_reference(reference: FrozenModel) -> Annotate:
    """Return a function that adds the reference's log-probs of the tokens."""
    return lambda batch: batch.replace(ref_logp=reference.logp(batch))


def annotate_with_teacher(teacher: FrozenModel, top: int, vocabulary: int) -> Annotate:
    """Return a function that adds the teacher's most likely tokens, among those that the trained model knows too."""

    def annotate(batch: Batch) -> Batch:
        ids, logp = teacher.top_tokens(batch, top, vocabulary)
        return batch.replace(teacher_topk_ids=ids, teacher_topk_logp=logp)

    return annotate


class SupervisedWorker:
    """One rank of a supervised run."""

    def __init__(self, loss: Loss, learner: Learner, annotate: Annotate | None = None) -> None:
        """annotate: adds the columns of another model, if the loss reads some."""
        self._objective, self._learner = LossObjective(loss), learner
        self._annotate: Annotate = annotate or (lambda batch: batch)
        self._meter = UtilizationMeter(learner.model.device)
        self._background = BackgroundSaver()

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def annotate(self, batch: Batch) -> Batch:
        """Return the batch with the other model's columns."""
        return self._annotate(batch)

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def update(self, batch: Batch) -> Metrics:
        """Make one optimizer step."""
        return self._learner.update(batch, self._objective)

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def measure(self, batch: Batch) -> Metrics:
        """Return the loss on a batch that is not trained on."""
        return self._learner.measure(batch, self._objective, self._annotate)

    @dispatch_mode()
    def parameters(self) -> tuple[int, int]:
        """Return the number of weights, and the number of trained weights."""
        return count_parameters(self._learner.model)

    @dispatch_mode()
    def tensors(self) -> Mapping[str, Any]:
        """Return the tensors of this rank that a checkpoint stores."""
        return self._learner.state()

    @dispatch_mode()
    def save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint, each rank its share."""
        return checkpoints.save(step, self.tensors(), facts)

    @dispatch_mode()
    def begin_save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint in the background; see `BackgroundSaver`."""
        self._background.begin(checkpoints, step, self.tensors(), facts)

    @dispatch_mode()
    def finish_save(self) -> Checkpoint | None:
        """Wait for the save in the background, and return its checkpoint; None if none was started."""
        return self._background.finish()

    @dispatch_mode()
    def resume(self, checkpoints: CheckpointManager, checkpoint: Checkpoint) -> None:
        """Load a checkpoint, written by any number of ranks."""
        tensors = self.tensors()
        checkpoints.load(checkpoint, tensors)
        self._learner.restore(tensors)

    @dispatch_mode(gather=Gather.METRICS)
    def utilization(self) -> Metrics:
        """Return the device's utilization since the last call."""
        return self._meter.read()


@dataclass(frozen=True)
class SupervisedLearner:
    """The trained model, as the loop calls it."""

    crew: Crew

    def annotate(self, batch: Batch) -> Batch:
        """Return the batch with the other model's columns."""
        return self.crew.call(SupervisedWorker.annotate, batch)

    def update(self, batch: Batch) -> Metrics:
        """Make one optimizer step."""
        return self.crew.call(SupervisedWorker.update, batch)

    def measure(self, batch: Batch) -> Metrics:
        """Return the loss on a batch that is not trained on."""
        return self.crew.call(SupervisedWorker.measure, batch)

    def parameters(self) -> tuple[int, int]:
        """Return the number of weights, and the number of trained weights."""
        return self.crew.call(SupervisedWorker.parameters)

    def facts(self) -> Mapping[str, Any]:
        """Return the plain values that a checkpoint stores of the model: none besides its tensors."""
        return {}

    def save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint of the model."""
        return self.crew.call(SupervisedWorker.save, checkpoints, step, facts)

    def begin_save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint in the background."""
        self.crew.call(SupervisedWorker.begin_save, checkpoints, step, facts)

    def finish_save(self) -> Checkpoint | None:
        """Wait for the save in the background, and return its checkpoint; None if none was started."""
        return self.crew.call(SupervisedWorker.finish_save)

    def resume(self, checkpoints: CheckpointManager, checkpoint: Checkpoint) -> None:
        """Restore the model from a checkpoint."""
        self.crew.call(SupervisedWorker.resume, checkpoints, checkpoint)

    def utilization(self) -> Metrics:
        """Return the device's utilization since the last call."""
        return self.crew.call(SupervisedWorker.utilization)
