"""The loop of a supervised run: read, annotate, update, evaluate, save."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from etude.batch import Batch
from etude.data.examples import Examples
from etude.errors import translate_memory_errors
from etude.observe import Last, Mean, Metrics, RunLog, get_logger
from etude.recipes.run.steps.save_resume import CheckpointSaver
from etude.recipes.supervised.config import ValidationConfig
from etude.recipes.supervised.examples import ExampleStream, read_batch
from etude.recipes.supervised.worker import SupervisedLearner


@dataclass
class PeriodicValidation:
    """Validation, as the loop calls it: checks if it is due, runs it, and keeps scores for the best checkpoint."""

    config: ValidationConfig
    learner: SupervisedLearner
    examples: Examples | None
    """The validation examples; None without any."""
    steps: int
    scores: dict[int, float] = field(default_factory=dict)
    """The score of each step, if it is finite: the negative loss."""

    def is_due(self, step: int) -> bool:
        """Return whether this step measures, and there are examples to measure on."""
        return self.examples is not None and self.config.is_due(step, self.steps)

    def read(self) -> Batch:
        """Return the examples that are measured, as one batch."""
        assert self.examples is not None, "something is measured"
        count = min(self.config.limit or len(self.examples), len(self.examples))
        return read_batch(self.examples, range(count), self.learner.put_bytes)

    def maybe_run(self, step: int) -> Metrics:
        """Measure the model if it is due after this step."""
        if not self.is_due(step):
            return Metrics()
        batch = self.read()
        metrics = self.learner.measure(batch)
        loss = metrics.reduce()["loss"]
        if math.isfinite(loss):
            self.scores[step] = -loss
        else:
            message = "The loss on `data.val` is %g after step %d: it cannot be compared, and marks no best checkpoint."
            get_logger("recipes").warning(f"{message} Lower `train.learning_rate` if it continues.", loss, step)
        if step == 0:
            message = "Before training, the loss on `data.val` is %.4g (%d examples)."
            get_logger("recipes").info(message, loss, batch.num_groups)
        return metrics.with_prefix("eval/")

    def score_at(self, step: int) -> float | None:
        """Return the score at a step, or None. Higher is better."""
        return self.scores.get(step)


@dataclass
class SupervisedComponents:
    """The components of the loop, ready to use."""

    directory: Path
    log: RunLog
    examples: ExampleStream
    learner: SupervisedLearner
    evaluate: PeriodicValidation
    checkpoint: CheckpointSaver
    counts: Metrics
    """Counts of the examples that were left out."""

    def begin(self) -> None:
        """Measure the initial model, if that is due."""
        if self.checkpoint.step == 0 and self.evaluate.is_due(0):
            with self.log.step(0) as at, at.timer("evaluate"):
                at.add(self.evaluate.maybe_run(0))

    def measure(self, batch: Batch) -> Metrics:
        """Return the metrics of a step's examples and of the device."""
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
    """Run the loop over components that are ready."""
    parts.begin()
    for step in parts.checkpoint.remaining_steps():
        with translate_memory_errors(), parts.log.step(step) as at:
            with at.timer("read"):
                batch = parts.examples.next(parts.learner.put_bytes)
            with at.timer("annotate"):
                batch = parts.learner.annotate(batch)
            with at.timer("update"):
                at.add(parts.learner.update(batch))
            at.add(parts.measure(batch))
            with at.timer("evaluate"):
                at.add(parts.evaluate.maybe_run(step))
        parts.checkpoint.maybe_save(step)  # the step's metrics are written by now
