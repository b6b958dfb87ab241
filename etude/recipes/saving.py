"""When a run saves, and where one that was killed goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from etude.checkpoint import CheckpointConfig, Checkpoints
from etude.observe import get_log
from etude.protocols import Crew
from etude.recipes.interrupt import Interrupt
from etude.recipes.sources import EngineSource
from etude.recipes.workers import PolicyWorker
from etude.store import Journal

__all__ = ["Saver"]


@dataclass
class Saver:
    """Keeps the count of steps, and the checkpoints that let it go on.

    A checkpoint holds what cannot be read from the journal: weights, optimizer, what the algorithm carries on, how far
    the order of tasks had come, and the journal's position that all this belongs to.
    """

    config: CheckpointConfig
    checkpoints: Checkpoints
    crew: Crew
    source: EngineSource
    store: Journal
    steps: int
    interrupt: Interrupt
    best: Callable[[int], float | None]
    """The score of the evaluation at a step, where there was one."""
    step: int = 0
    """The last step that is done."""
    saved: int = 0

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one, and from what the journal has beyond it."""
        found = self.checkpoints.newest(fall_back=self.config.fall_back)
        if found is None:
            self.source.take_up(None, 0)
            return
        tensors = self.crew.call(PolicyWorker.tensors)
        self.checkpoints.load(found, tensors)
        self.crew.call(PolicyWorker.restore, tensors, found.facts["learner"])
        self.source.take_up(found.facts["source"], found.facts["position"])
        self.step = self.saved = found.step

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
        kept = self.checkpoints.best_score()
        better = score is not None and step > 0 and (kept is None or score > kept)
        if step % self.config.every == 0 or step == self.steps or self.interrupt.asked or better:
            self.save(step)
            if score is not None:
                self.checkpoints.mark_best(step, score)

    def save(self, step: int) -> None:
        """Write a checkpoint of this step."""
        self.store.flush()
        facts = {
            "position": self.store.position,
            "learner": self.crew.call(PolicyWorker.facts),
            "source": self.source.state(),
        }
        made = self.checkpoints.save(step, self.crew.call(PolicyWorker.tensors), facts)
        self.saved = step
        get_log("recipes").debug("Saved step %d in %s.", step, made.path)
