"""The loop of a run that learns from examples: read, annotate, update, again and again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from etude.batch import Batch
from etude.errors import translate_memory_errors
from etude.observe import Last, Mean, Metrics, RunLog, get_logger
from etude.recipes.run.save_resume import CheckpointSaver
from etude.recipes.supervised.config import ValidationConfig
from etude.recipes.supervised.examples import ExampleStream
from etude.recipes.supervised.worker import SupervisedLearner

__all__ = ["PeriodicValidation", "SupervisedComponents", "run_supervised_loop"]


@dataclass
class PeriodicValidation:
    """Validation as the loop speaks to it: due or not, told, and remembered for the best checkpoint."""

    config: ValidationConfig
    learner: SupervisedLearner
    batch: Batch | None
    """What is measured on, all at once; None where there is nothing."""
    steps: int
    scores: dict[int, float] = field(default_factory=dict)
    """The score of each step, where it is finite: the loss, its sign turned."""

    def is_due(self, step: int) -> bool:
        """Whether this step asks for it, and there is something to measure on."""
        return self.batch is not None and self.config.is_due(step, self.steps)

    def maybe_run(self, step: int) -> Metrics:
        """Measure the model if this step asks for it."""
        if self.batch is None or not self.is_due(step):
            return Metrics()
        metrics = self.learner.measure(self.batch)
        loss = metrics.reduce()["loss"]
        if math.isfinite(loss):
            self.scores[step] = -loss
        else:
            message = (
                "The loss on `data.val` is %g after step %d: it is no number to compare, and marks no best checkpoint."
            )
            get_logger("recipes").warning(f"{message} Lower `train.learning_rate` if it goes on.", loss, step)
        if step == 0:
            message = "Before training, the loss on `data.val` is %.4g (%d examples)."
            get_logger("recipes").info(message, loss, self.batch.num_groups)
        return metrics.with_prefix("eval/")

    def score_at(self, step: int) -> float | None:
        """The score at a step, where there was one: the higher, the better."""
        return self.scores.get(step)


@dataclass
class SupervisedComponents:
    """The parts of the loop, ready."""

    directory: Path
    log: RunLog
    examples: ExampleStream
    learner: SupervisedLearner
    evaluate: PeriodicValidation
    checkpoint: CheckpointSaver
    counts: Metrics
    """What was left out of the examples."""

    def begin(self) -> None:
        """Measure the model that the run begins with, if that is asked for: a line of its own."""
        if self.checkpoint.step == 0 and self.evaluate.is_due(0):
            with self.log.step(0) as at, at.timer("evaluate"):
                at.add(self.evaluate.maybe_run(0))

    def measure(self, batch: Batch) -> Metrics:
        """What is seen of a step's examples, and of the device."""
        learned = int(batch.action.sum())
        metrics = Metrics(
            {
                "examples": Last.of(batch.num_groups),
                "epoch": Last.of(self.examples.epoch),
                "prompt_length": Mean.over(batch.num_tokens - learned, batch.num_rollouts),
                "answer_length": Mean.over(learned, batch.num_rollouts),
            }
        )
        metrics.merge(self.counts)
        metrics.merge(self.learner.utilization())
        metrics.merge(self.checkpoint.pop_metrics())
        return metrics


def run_supervised_loop(parts: SupervisedComponents) -> None:
    """The loop itself, over parts that are ready."""
    parts.begin()
    for step in parts.checkpoint.remaining_steps():
        with translate_memory_errors(), parts.log.step(step) as at:
            with at.timer("read"):
                batch = parts.examples.next()
            with at.timer("annotate"):
                batch = parts.learner.annotate(batch)
            with at.timer("update"):
                at.add(parts.learner.update(batch))
            at.add(parts.measure(batch))
            with at.timer("evaluate"):
                at.add(parts.evaluate.maybe_run(step))
        parts.checkpoint.maybe_save(step)  # what the step measured is written by now
