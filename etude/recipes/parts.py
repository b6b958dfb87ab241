"""What a loop is made of, as the loop speaks to it; `build` decides what stands behind each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from etude.batch import Batch
from etude.data.collate import collate
from etude.observe import Last, Max, Mean, Metrics, RunLog, get_log
from etude.protocols import Crew
from etude.recipes.evaluate import Answer, Evaluator, scores, write_answers
from etude.recipes.meter import Meter
from etude.recipes.saving import Saver
from etude.recipes.sources import EngineSource, Groups
from etude.recipes.workers import PolicyWorker
from etude.rollout import TorchEngine
from etude.store import Journal, events
from etude.sync import LocalCarrier

__all__ = ["Learners", "Parts", "Scoring"]


@dataclass
class Learners:
    """The trained roles, as the loop speaks to them: one policy."""

    crew: Crew
    columns: frozenset[str]
    """What the model itself must tell of a batch before advantages can be estimated."""

    def annotate(self, batch: Batch) -> Batch:
        """The batch with what the run's algorithms declared they need of the model."""
        return self.crew.call(PolicyWorker.annotate, batch, self.columns) if self.columns else batch

    def estimate(self, batch: Batch, step: int) -> Batch:
        """The batch with corrections and advantages."""
        return self.crew.call(PolicyWorker.estimate, batch, step)

    def update(self, batch: Batch) -> Metrics:
        """Every optimizer step that this batch is good for."""
        return self.crew.call(PolicyWorker.update, batch)


@dataclass
class Scoring:
    """Evaluation as the loop speaks to it: due or not, shown, written, and remembered for the best checkpoint."""

    evaluator: Evaluator | None
    directory: Path
    steps: int
    store: Journal
    found: dict[int, float] = field(default_factory=dict)

    def maybe_run(self, step: int) -> Metrics:
        """Score the policy if this step asks for it."""
        if self.evaluator is None or not self.evaluator.due(step, self.steps):
            return Metrics()
        answers = self.evaluator.answers()
        metrics = scores(answers)
        self.found[step] = sum(a.reward for a in answers) / len(answers)
        self._keep(step, answers, metrics)
        if step == 0:
            get_log("recipes").info("Before training, the score is %.4g on %d answers.", self.found[0], len(answers))
        return metrics

    def best(self, step: int) -> float | None:
        """The score at a step, where there was one."""
        return self.found.get(step)

    def _keep(self, step: int, answers: list[Answer], metrics: Metrics) -> None:
        write_answers(answers, self.directory / "evaluations" / f"step-{step:08d}.jsonl")
        self.store.append([events.Evaluated(step, "val", dict(metrics.reduce()))])


@dataclass
class Parts:
    """The parts of a loop, ready."""

    directory: Path
    log: RunLog
    source: EngineSource
    learners: Learners
    evaluate: Scoring
    checkpoint: Saver
    engine: TorchEngine
    carrier: LocalCarrier
    store: Journal
    meter: Meter
    overlong: int
    """How many prompts of `data.train` were too long."""

    def collate(self, groups: Groups) -> Batch:
        """One batch of a step's groups."""
        batch = collate(groups.samples, groups.rollouts)
        return batch.replace(trainer_version=batch.group.new_full((batch.rollouts,), self.checkpoint.step))

    def publish(self, version: int) -> Metrics:
        """Hand the weights to every engine, under a new version."""
        weights = self.learners.crew.call(PolicyWorker.weights)
        return asyncio.run(self.carrier.publish(weights, version))

    def measure(self, groups: Groups, batch: Batch) -> Metrics:
        """What is seen of a step's rollouts, of the engine that drew them, and of the device."""
        answers = [int(sample.action.sum()) for sample in groups.samples]
        prompts = [len(sample.ids) - answer for sample, answer in zip(groups.samples, answers, strict=True)]
        rewards = [rollout.reward for rollout in groups.rollouts]
        metrics = Metrics(
            {
                "reward": Mean.over(sum(rewards), len(rewards)),
                "prompt_length": Mean.over(sum(prompts), len(prompts)),
                "answer_length": Mean.over(sum(answers), len(answers)),
                "answer_length_max": Max.of(max(answers, default=0)),
                "truncated": Mean.over(sum(r.truncated for r in groups.rollouts), len(rewards)),
                "rollouts": Last.of(len(rewards)),
                "tokens": Last.of(batch.tokens),
                "overlong_prompts": Last.of(self.overlong),
                "replayed": Last.of(float(groups.replayed)),
            }
        )
        for rollout in groups.rollouts:
            for name, value in rollout.parts.items():
                metrics.add(f"reward/{name}", Mean.of(value))
        metrics.merge(groups.metrics)
        metrics.merge(self.engine.stats())
        metrics.merge(self.meter.read())
        return metrics
