"""The worker of a supervised run: one model, its loss, and the columns that an auxiliary model adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etude.algorithms import Loss
from etude.batch import Batch, StoredBytes
from etude.dispatch import LocalCrew
from etude.observe import Metrics
from etude.protocols import Crew, Gather, Split, dispatch_mode
from etude.recipes.workers.checkpointed import CheckpointedModels, CheckpointedWorker
from etude.recipes.workers.policy_worker import LossObjective
from etude.recipes.workers.utilization import UtilizationMeter, count_parameters
from etude.train import Learner, ScoringModel

Annotate = Callable[[Batch], Batch]
"""Adds the columns that another model computes."""


def annotate_with_reference(reference: ScoringModel) -> Annotate:
    """Return a function that adds the reference's log-probs of the tokens."""
    return lambda batch: batch.replace(ref_logp=reference.logp(batch))


def annotate_with_teacher(teacher: ScoringModel, top: int, vocabulary: int) -> Annotate:
    """Return a function that adds the teacher's most likely tokens, among those that the trained model knows too."""

    def annotate(batch: Batch) -> Batch:
        ids, logp = teacher.top_tokens(batch, top, vocabulary)
        return batch.replace(teacher_topk_ids=ids, teacher_topk_logp=logp)

    return annotate


class SupervisedWorker(CheckpointedWorker):
    """One rank of a supervised run."""

    def __init__(self, loss: Loss, learner: Learner, annotate: Annotate | None = None) -> None:
        """annotate: adds the columns of another model, if the loss reads some."""
        super().__init__()
        self._objective = LossObjective(loss)
        self._learner = learner
        self._annotate: Annotate = annotate or (lambda batch: batch)
        self._meter = UtilizationMeter(learner.model.device)

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
        return self._learner.state()

    def restore(self, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._learner.restore(tensors)

    @dispatch_mode(gather=Gather.METRICS)
    def utilization(self) -> Metrics:
        """Return the device's utilization since the last call."""
        return self._meter.read()


@dataclass(frozen=True)
class SupervisedLearner(CheckpointedModels):
    """The trained model, as the loop calls it."""

    crew: Crew

    @property
    def put_bytes(self) -> Callable[[bytes], bytes | StoredBytes] | None:
        """The function that stores bytes where the ranks can read them; None if the only rank is in this process."""
        return None if isinstance(self.crew, LocalCrew) else self.crew.put_bytes

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

    def utilization(self) -> Metrics:
        """Return the device's utilization since the last call."""
        return self.crew.call(SupervisedWorker.utilization)
