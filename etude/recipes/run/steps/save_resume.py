"""Saves checkpoints of a run, and resumes from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from etude.checkpoint import Checkpoint, CheckpointConfig, CheckpointManager
from etude.errors import ConfigError, EtudeError
from etude.observe import Metrics, RunLog, Sum, get_logger
from etude.recipes.interrupt import Interrupt
from etude.store import JournalMark


class TrainedState(Protocol):
    """The trained models of a run."""

    def facts(self) -> Mapping[str, Any]:
        """Return the plain values that a checkpoint stores of the models."""
        ...

    def save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint of the models, with these facts."""
        ...

    def begin_save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> None:
        """Copy the models, and begin to write a checkpoint of them in the background."""
        ...

    def finish_save(self) -> Checkpoint | None:
        """Wait for the save in the background, and return its checkpoint; None if none was started."""
        ...

    def resume(self, checkpoints: CheckpointManager, checkpoint: Checkpoint) -> None:
        """Restore the models from a checkpoint."""
        ...


class DataPosition(Protocol):
    """The position of a run in its data."""

    def mark(self) -> tuple[Mapping[str, Any], JournalMark]:
        """Return the position in the data, as a JSON tree, and that of the flushed journal at the same moment."""
        ...

    def resume_from(self, step: int, state: Mapping[str, Any] | None, mark: JournalMark) -> None:
        """Resume where this step was saved (0 and None: the beginning), and replay the later steps of the journal."""
        ...


def resume_run(
    config: CheckpointConfig,
    checkpoints: CheckpointManager,
    trained: TrainedState,
    data: DataPosition,
    steps: int | None,
) -> int:
    """Resume from the newest checkpoint, if any, and from later steps in the journal; return the checkpoint's step.

    steps: the length of the run; a run that is longer already is refused. None leaves that check to `data.resume_from`.

    If the run was killed between saving a checkpoint and marking it as the best, this marks it.
    """
    checkpoints.best_score()  # refuses an unreadable record now, and not after the step that is to be saved
    checkpoint = checkpoints.newest(fall_back=config.fall_back)
    if checkpoint is None:
        data.resume_from(0, None, JournalMark(0, 0))
        return 0
    if steps is not None and checkpoint.step > steps:
        raise ConfigError(
            f"The run in {checkpoints.directory.parent} has done {checkpoint.step} steps, and `steps={steps}` asks "
            "for fewer: they cannot be undone. Ask for more, or start a new run in another `directory`."
        )
    trained.resume(checkpoints, checkpoint)
    data.resume_from(
        checkpoint.step,
        checkpoint.facts["source"],
        JournalMark(checkpoint.facts["position"], checkpoint.facts["chain"]),
    )
    if checkpoint.facts["score"] is not None:
        checkpoints.mark_best(checkpoint.step, checkpoint.facts["score"], checkpoint.facts["measured"])
    return checkpoint.step


@dataclass
class CheckpointSaver:
    """Counts the steps of a run, and saves the checkpoints that it resumes from.

    A checkpoint holds everything that the journal does not: weights, optimizer, and the algorithm's state. It also
    holds the position in the order of tasks, the matching position of the journal, and the score of its step. The
    metrics of all steps up to it are written before the checkpoint.
    """

    config: CheckpointConfig
    checkpoints: CheckpointManager
    trained: TrainedState
    data: DataPosition
    steps: int
    interrupt: Interrupt
    log: RunLog
    score_at: Callable[[int], float | None]
    """Returns the evaluation score at a step, or None."""
    evaluation_id: str
    """The id of the way in which scores are measured; scores with other ids are not comparable."""
    step: int
    """The last step that is done."""
    saved_step: int
    """The last step that has a checkpoint."""
    before_save: Callable[[int], None] = lambda _: None
    """Called with each step before it is saved."""
    pending_step: int | None = None
    """The step whose checkpoint is being written in the background. It does not count as saved."""
    seconds: float = 0.0
    """Seconds that steps waited for saving since the last `pop_metrics`."""

    def remaining_steps(self) -> Iterator[int]:
        """Yield the steps to do, until all are done or the user asks to stop."""
        while self.step < self.steps and not self.interrupt.stop_requested:
            yield self.step + 1
            self.step += 1
        if max(self.saved_step, self.pending_step or 0) < self.step:  # the user asked to stop while it finished
            self.save(self.step)
        self.finish()

    def maybe_save(self, step: int) -> None:
        """Save if due: every `checkpoint.every` steps, after the last step, before a stop, and after a new best
        score."""
        score, best = self.score_at(step), self.checkpoints.best_score(self.evaluation_id)
        pending = None if self.pending_step is None else self.score_at(self.pending_step)
        better_than = max((known for known in (best, pending) if known is not None), default=None)
        is_better = score is not None and step > 0 and (better_than is None or score > better_than)
        if step % self.config.every == 0 or step == self.steps or self.interrupt.stop_requested or is_better:
            self.save(step)

    def mark_best(self, step: int) -> None:
        """Mark the checkpoint of a step as the best, if the step has the best score so far."""
        score = self.score_at(step)
        if score is not None and step > 0:
            self.checkpoints.mark_best(step, score, self.evaluation_id)

    def save(self, step: int) -> None:
        """Write a checkpoint of this step, and mark it if it is the best. With `checkpoint.async_save`, begin to."""
        self.before_save(step)
        with self._timed():
            self._finish()  # one save at a time; also, the earlier step may be the best
            facts = self._facts(step)
            if self.config.async_save:
                self.trained.begin_save(self.checkpoints, step, facts)
                self.pending_step = step
            else:
                self._record(self.trained.save(self.checkpoints, step, facts))

    def finish(self) -> None:
        """Wait until the save in the background is on the disk, if there is one. A failure is raised here."""
        if self.pending_step is not None:
            with self._timed():
                self._finish()

    def close(self, kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        """Finish the save in the background at the end of a run, also of one that failed.

        A run that is stopped at once does not wait. The checkpoint then counts only if it is whole in time.
        """
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return
        try:
            self.finish()
        except (EtudeError, OSError) as error:
            if kind is None:
                raise
            get_logger("recipes").warning("%s", error)

    def _finish(self) -> None:
        if self.pending_step is not None:
            self.pending_step = None
            checkpoint = self.trained.finish_save()
            assert checkpoint is not None, "a save was started"
            self._record(checkpoint)

    def _record(self, checkpoint: Checkpoint) -> None:
        """Count a step as saved, now that its checkpoint is on the disk."""
        self.saved_step = checkpoint.step
        get_logger("recipes").debug("Saved step %d in %s.", checkpoint.step, checkpoint.path)
        self.mark_best(checkpoint.step)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def _facts(self, step: int) -> Mapping[str, Any]:
        """Return what a checkpoint stores besides tensors. Metrics and journal are on the disk up to this step then."""
        self.log.flush()
        state, mark = self.data.mark()
        return {
            "score": self.score_at(step),
            "measured": self.evaluation_id,
            **mark._asdict(),
            "learner": self.trained.facts(),
            "source": state,
        }

    def pop_metrics(self) -> Metrics:
        """Return `save_seconds`, the seconds that steps waited for saving since the last call, if they did."""
        seconds = self.seconds
        self.seconds = 0.0
        return Metrics({"save_seconds": Sum.of(seconds)}) if seconds else Metrics()
