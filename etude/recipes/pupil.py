"""Who learns from examples: one model, its loss, and what others tell of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from etude.algorithms import Loss
from etude.batch import Batch
from etude.checkpoint import Checkpoint, Checkpoints
from etude.observe import Metrics
from etude.protocols import Crew, Gather, Split, spread
from etude.recipes.workers import Minimise
from etude.train import Frozen, Learner

__all__ = ["Annotate", "Pupil", "PupilWorker", "by_reference", "by_teacher"]

Annotate = Callable[[Batch], Batch]
"""Adds the columns that another model tells."""


def by_reference(reference: Frozen) -> Annotate:
    """What a reference thinks of the tokens."""
    return lambda batch: batch.replace(ref_logp=reference.logp(batch))


def by_teacher(teacher: Frozen, top: int, vocabulary: int) -> Annotate:
    """What a teacher would rather have said, among the tokens that its pupil knows too."""

    def annotate(batch: Batch) -> Batch:
        ids, logp = teacher.likeliest(batch, top, vocabulary)
        return batch.replace(teacher_topk_ids=ids, teacher_topk_logp=logp)

    return annotate


class PupilWorker:
    """One rank of a model that learns from examples."""

    def __init__(self, loss: Loss, learner: Learner, annotate: Annotate | None = None) -> None:
        """annotate: what others tell, where the loss asks for it."""
        self._objective, self._learner = Minimise(loss), learner
        self._annotate: Annotate = annotate or (lambda batch: batch)

    @spread(Split.GROUPS, Gather.CONCAT)
    def annotate(self, batch: Batch) -> Batch:
        """The batch with what others tell of it."""
        return self._annotate(batch)

    @spread(Split.GROUPS, Gather.METRICS)
    def update(self, batch: Batch) -> Metrics:
        """One optimizer step."""
        return self._learner.update(batch, self._objective)

    @spread(Split.GROUPS, Gather.METRICS)
    def measure(self, batch: Batch) -> Metrics:
        """What the loss says of a batch that nothing is learned from."""
        return self._learner.measure(batch, self._objective, self._annotate)

    @spread()
    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights by their published names."""
        return self._learner.weights()

    @spread()
    def tensors(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of this rank."""
        return self._learner.state()

    @spread()
    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._learner.restore(tensors)


@dataclass(frozen=True)
class Pupil:
    """The model that learns, as the loop speaks to it."""

    crew: Crew

    def annotate(self, batch: Batch) -> Batch:
        """The batch with what others tell of it."""
        return self.crew.call(PupilWorker.annotate, batch)

    def update(self, batch: Batch) -> Metrics:
        """One optimizer step."""
        return self.crew.call(PupilWorker.update, batch)

    def measure(self, batch: Batch) -> Metrics:
        """What the loss says of a batch that nothing is learned from."""
        return self.crew.call(PupilWorker.measure, batch)

    def facts(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of it in plain numbers: nothing that its tensors do not tell."""
        return {}

    def save(self, checkpoints: Checkpoints, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint."""
        return checkpoints.save(step, self.crew.call(PupilWorker.tensors), facts)

    def resume(self, checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
        """Go on from one."""
        tensors = self.crew.call(PupilWorker.tensors)
        checkpoints.load(checkpoint, tensors)
        self.crew.call(PupilWorker.restore, tensors)
