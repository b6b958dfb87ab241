"""The part of a worker that saves and resumes, and the same verbs as a training loop calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from etude.checkpoint import BackgroundSaver, Checkpoint, CheckpointManager
from etude.protocols import Crew, dispatch_mode


class CheckpointedWorker(ABC):
    """A worker that writes and reads its rank's share of a checkpoint."""

    def __init__(self) -> None:
        self._background = BackgroundSaver()

    @abstractmethod
    def tensors(self) -> Mapping[str, Any]:
        """Return the tensors of this rank that a checkpoint stores."""

    @abstractmethod
    def restore(self, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's tensors, and from the facts that the controller stored with them."""

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
        self.restore(tensors, checkpoint.facts["learner"])


class CheckpointedModels:
    """The models of a crew's workers, as a training loop saves and resumes them."""

    crew: Crew

    def save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint of the trained models."""
        return self.crew.call(CheckpointedWorker.save, checkpoints, step, facts)

    def begin_save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint in the background."""
        self.crew.call(CheckpointedWorker.begin_save, checkpoints, step, facts)

    def finish_save(self) -> Checkpoint | None:
        """Wait for the save in the background, and return its checkpoint; None if none was started."""
        return self.crew.call(CheckpointedWorker.finish_save)

    def resume(self, checkpoints: CheckpointManager, checkpoint: Checkpoint) -> None:
        """Restore the trained models from a checkpoint."""
        self.crew.call(CheckpointedWorker.resume, checkpoints, checkpoint)
