"""When a run saves, and where one that was killed goes on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from etude.checkpoint import Checkpoint, CheckpointConfig, CheckpointManager
from etude.errors import ConfigError
from etude.observe import Metrics, RunLog, Sum, get_logger
from etude.recipes.run.interrupt import Interrupt
from etude.store import JournalMark

__all__ = ["CheckpointSaver", "DataPosition", "TrainedState", "resume_run"]


class TrainedState(Protocol):
    """What was learned: the trained roles of a run."""

    def facts(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of them in plain numbers."""
        ...

    def save(self, checkpoints: CheckpointManager, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint of them, with these facts."""
        ...

    def resume(self, checkpoints: CheckpointManager, checkpoint: Checkpoint) -> None:
        """Go on from one."""
        ...


class DataPosition(Protocol):
    """How far the data was read."""

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
    """Go on from the newest checkpoint, if there is one, and from what the journal has beyond it; returns its step,
    of `steps` that are wanted. None: it is `read` that knows how far the run is to go, and refuses to go back.

    A kill between a save and its mark as the best is made good.
    """
    checkpoints.best_score()  # what cannot be read of it is refused now, not after the step that is to be saved
    checkpoint = checkpoints.newest(fall_back=config.fall_back)
    if checkpoint is None:
        data.resume_from(0, None, JournalMark(0, 0))
        return 0
    if steps is not None and checkpoint.step > steps:
        raise ConfigError(
            f"The run in {checkpoints.directory.parent} has done {checkpoint.step} steps, and `steps={steps}` asks for "
            f"fewer: they cannot be undone. Ask for more, or start a new run in another `directory`."
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
    """Keeps the count of steps, and the checkpoints that let it go on.

    A checkpoint holds what cannot be read from the journal: weights, optimizer, what the algorithm carries on, how far
    the order of tasks had come, and the journal's position that all this belongs to; and the score of its step. What
    the steps up to it measured is written before it is.
    """

    config: CheckpointConfig
    checkpoints: CheckpointManager
    trained: TrainedState
    data: DataPosition
    steps: int
    interrupt: Interrupt
    log: RunLog
    score_at: Callable[[int], float | None]
    """The score of the evaluation at a step, where there was one."""
    evaluation_id: str
    """What scores are measured with: others do not compare."""
    step: int
    """The last step that is done."""
    saved_step: int
    """The last one that has its checkpoint."""
    seconds: float = 0.0
    """What saving took since that was last asked."""

    def remaining_steps(self) -> Iterator[int]:
        """The steps to do, until there are none or somebody asked to stop."""
        while self.step < self.steps and not self.interrupt.stop_requested:
            yield self.step + 1
            self.step += 1
        if self.saved_step < self.step:  # asked to stop while the last step was being finished
            self.save(self.step)

    def maybe_save(self, step: int) -> None:
        """Save where it is due: every so often, after the last step, when the run is to stop, and for a new best."""
        score = self.score_at(step)
        best = self.checkpoints.best_score(self.evaluation_id)
        is_better = score is not None and step > 0 and (best is None or score > best)
        if step % self.config.every == 0 or step == self.steps or self.interrupt.stop_requested or is_better:
            self.save(step)
            self.mark_best(step)

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of a step as the best, if the step was scored and is better than the best so far."""
        score = self.score_at(step)
        if score is not None and step > 0:
            self.checkpoints.mark_best(step, score, self.evaluation_id)

    def save(self, step: int) -> None:
        """Write a checkpoint of this step."""
        began = time.perf_counter()
        self.log.flush()
        state, mark = self.data.mark()
        facts = {
            "score": self.score_at(step),
            "measured": self.evaluation_id,
            **mark._asdict(),
            "learner": self.trained.facts(),
            "source": state,
        }
        checkpoint = self.trained.save(self.checkpoints, step, facts)
        self.saved_step = step
        self.seconds += time.perf_counter() - began
        get_logger("recipes").debug("Saved step %d in %s.", step, checkpoint.path)

    def pop_metrics(self) -> Metrics:
        """`save_seconds`: what saving took since this was last asked, where anything was saved."""
        seconds, self.seconds = self.seconds, 0.0
        return Metrics({"save_seconds": Sum.of(seconds)}) if seconds else Metrics()
