"""The loop of a run that learns from examples: read, annotate, update, again and again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from etude.batch import Batch
from etude.errors import memory_in_words
from etude.observe import Last, Mean, Metrics, RunLog, get_log
from etude.recipes.lessons import Lessons
from etude.recipes.pupil import Pupil
from etude.recipes.saving import Saver
from etude.recipes.supervised import Validation

__all__ = ["Measuring", "Study", "learn"]


@dataclass
class Measuring:
    """Validation as the loop speaks to it: due or not, told, and remembered for the best checkpoint."""

    config: Validation
    pupil: Pupil
    batch: Batch | None
    """What is measured on, all at once; None where there is nothing."""
    steps: int
    found: dict[int, float] = field(default_factory=dict)
    """The score of each step, where it is finite: the loss, its sign turned."""

    def due(self, step: int) -> bool:
        """Whether this step asks for it, and there is something to measure on."""
        return self.batch is not None and self.config.due(step, self.steps)

    def maybe_run(self, step: int) -> Metrics:
        """Measure the model if this step asks for it."""
        if self.batch is None or not self.due(step):
            return Metrics()
        metrics = self.pupil.measure(self.batch)
        loss = metrics.reduce()["loss"]
        if math.isfinite(loss):
            self.found[step] = -loss
        else:
            told = (
                "The loss on `data.val` is %g after step %d: it is no number to compare, and marks no best checkpoint."
            )
            get_log("recipes").warning(f"{told} Lower `train.learning_rate` if it goes on.", loss, step)
        if step == 0:
            told = "Before training, the loss on `data.val` is %.4g (%d examples)."
            get_log("recipes").info(told, loss, self.batch.groups)
        return metrics.prefixed("eval/")

    def best(self, step: int) -> float | None:
        """The score at a step, where there was one: the higher, the better."""
        return self.found.get(step)


@dataclass
class Study:
    """The parts of the loop, ready."""

    directory: Path
    log: RunLog
    lessons: Lessons
    pupil: Pupil
    evaluate: Measuring
    checkpoint: Saver
    counts: Metrics
    """What was left out of the examples."""

    def begin(self) -> None:
        """Measure the model that the run begins with, if that is asked for: a line of its own."""
        if self.checkpoint.step == 0 and self.evaluate.due(0):
            with self.log.step(0) as at, at.timer("evaluate"):
                at.add(self.evaluate.maybe_run(0))

    def measure(self, batch: Batch) -> Metrics:
        """What is seen of a step's examples, and of the device."""
        learned = int(batch.action.sum())
        metrics = Metrics(
            {
                "examples": Last.of(batch.groups),
                "epoch": Last.of(self.lessons.epoch),
                "prompt_length": Mean.over(batch.tokens - learned, batch.rollouts),
                "answer_length": Mean.over(learned, batch.rollouts),
            }
        )
        metrics.merge(self.counts)
        metrics.merge(self.pupil.utilisation())
        metrics.merge(self.checkpoint.spent())
        return metrics


def learn(parts: Study) -> None:
    """The loop itself, over parts that are ready."""
    parts.begin()
    for step in parts.checkpoint.remaining():
        with memory_in_words(), parts.log.step(step) as at:
            with at.timer("read"):
                batch = parts.lessons.next()
            with at.timer("annotate"):
                batch = parts.pupil.annotate(batch)
            with at.timer("update"):
                at.add(parts.pupil.update(batch))
            at.add(parts.measure(batch))
            with at.timer("evaluate"):
                at.add(parts.evaluate.maybe_run(step))
        parts.checkpoint.maybe_save(step)  # what the step measured is written by now
