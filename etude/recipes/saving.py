"""When a run saves, and where one that was killed goes on from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from etude.checkpoint import Checkpoint, CheckpointConfig, Checkpoints
from etude.errors import ConfigError
from etude.observe import Metrics, RunLog, Sum, get_log
from etude.recipes.interrupt import Interrupt
from etude.store import Mark

__all__ = ["Learned", "Read", "Saver", "taken_up"]


class Learned(Protocol):
    """What was learned: the trained roles of a run."""

    def facts(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of them in plain numbers."""
        ...

    def save(self, checkpoints: Checkpoints, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint of them, with these facts."""
        ...

    def resume(self, checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
        """Go on from one."""
        ...


class Read(Protocol):
    """How far the data was read."""

    def mark(self) -> tuple[Mapping[str, Any], Mark]:
        """Return the position in the data, as a JSON tree, and that of the flushed journal at the same moment."""
        ...

    def take_up(self, step: int, state: Mapping[str, Any] | None, mark: Mark) -> None:
        """Resume where this step was saved (0 and None: the beginning), and replay the later steps of the journal."""
        ...


def taken_up(
    config: CheckpointConfig, checkpoints: Checkpoints, learned: Learned, read: Read, steps: int | None
) -> int:
    """Go on from the newest checkpoint, if there is one, and from what the journal has beyond it; returns its step,
    of `steps` that are wanted. None: it is `read` that knows how far the run is to go, and refuses to go back.

    A kill between a save and its mark as the best is made good.
    """
    checkpoints.best_score()  # what cannot be read of it is refused now, not after the step that is to be saved
    found = checkpoints.newest(fall_back=config.fall_back)
    if found is None:
        read.take_up(0, None, Mark(0, 0))
        return 0
    if steps is not None and found.step > steps:
        raise ConfigError(
            f"The run in {checkpoints.directory.parent} has done {found.step} steps, and `steps={steps}` asks for "
            f"fewer: they cannot be undone. Ask for more, or start a new run in another `directory`."
        )
    learned.resume(checkpoints, found)
    read.take_up(found.step, found.facts["source"], Mark(found.facts["position"], found.facts["chain"]))
    if found.facts["score"] is not None:
        checkpoints.mark_best(found.step, found.facts["score"], found.facts["measured"])
    return found.step


@dataclass
class Saver:
    """Keeps the count of steps, and the checkpoints that let it go on.

    A checkpoint holds what cannot be read from the journal: weights, optimizer, what the algorithm carries on, how far
    the order of tasks had come, and the journal's position that all this belongs to; and the score of its step. What
    the steps up to it measured is written before it is.
    """

    config: CheckpointConfig
    checkpoints: Checkpoints
    learned: Learned
    read: Read
    steps: int
    interrupt: Interrupt
    log: RunLog
    best: Callable[[int], float | None]
    """The score of the evaluation at a step, where there was one."""
    measured: str
    """What scores are measured with: others do not compare."""
    step: int
    """The last step that is done."""
    saved: int
    """The last one that has its checkpoint."""
    seconds: float = 0.0
    """What saving took since that was last asked."""

    def remaining(self) -> Iterator[int]:
        """The steps to do, until there are none or somebody asked to stop."""
        while self.step < self.steps and not self.interrupt.asked:
            yield self.step + 1
            self.step += 1
        if self.saved < self.step:  # asked to stop while the last step was being finished
            self.save(self.step)

    def maybe_save(self, step: int) -> None:
        """Save where it is due: every so often, after the last step, when the run is to stop, and for a new best."""
        score = self.best(step)
        kept = self.checkpoints.best_score(self.measured)
        better = score is not None and step > 0 and (kept is None or score > kept)
        if step % self.config.every == 0 or step == self.steps or self.interrupt.asked or better:
            self.save(step)
            self.mark_best(step)

    def mark_best(self, step: int) -> None:
        """Keep the checkpoint of a step as the best, if the step was scored and is better than the best so far."""
        score = self.best(step)
        if score is not None and step > 0:
            self.checkpoints.mark_best(step, score, self.measured)

    def save(self, step: int) -> None:
        """Write a checkpoint of this step."""
        began = time.perf_counter()
        self.log.flush()
        state, mark = self.read.mark()
        facts = {
            "score": self.best(step),
            "measured": self.measured,
            **mark._asdict(),
            "learner": self.learned.facts(),
            "source": state,
        }
        made = self.learned.save(self.checkpoints, step, facts)
        self.saved = step
        self.seconds += time.perf_counter() - began
        get_log("recipes").debug("Saved step %d in %s.", step, made.path)

    def spent(self) -> Metrics:
        """`save_seconds`: what saving took since this was last asked, where anything was saved."""
        seconds, self.seconds = self.seconds, 0.0
        return Metrics({"save_seconds": Sum.of(seconds)}) if seconds else Metrics()
