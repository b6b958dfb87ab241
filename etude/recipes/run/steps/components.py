"""The components of a training loop, as the loop calls them; `build` chooses the implementation of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from etude.batch import Batch, BatchMeta, BatchSchema, StoredBytes
from etude.observe import Last, Max, Mean, Metrics, RunLog
from etude.protocols import Crew, Ids, TokenGenerator
from etude.recipes.collect.collector import Collector
from etude.recipes.collect.rollouts import ScoredRollout, StepGroups
from etude.recipes.event_loop import LoopThread
from etude.recipes.run.steps.ess_warnings import EssWarnings
from etude.recipes.run.steps.evaluation import PeriodicEvaluation
from etude.recipes.run.steps.sampled_rollouts import choose_rollouts, read_sampled
from etude.recipes.run.steps.save_resume import CheckpointSaver
from etude.recipes.run.steps.source_metrics import SourceMetrics
from etude.recipes.run.steps.step_images import ReadImages, store_images
from etude.recipes.workers.checkpointed import CheckpointedModels
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.records import Rollout, Sample
from etude.store import AdvantagesEstimated, Journal
from etude.store.queue.rollout_queue import RolloutQueue


class Engine(TokenGenerator, Protocol):
    """The engine interface that the loop uses: one engine, or one on each rank."""

    def stats(self) -> Metrics:
        """Return the statistics since the last call."""
        ...


@dataclass
class Learners(CheckpointedModels):
    """The trained models, as the loop calls them. Batches that they return may stay on the ranks."""

    crew: Crew
    columns: frozenset[str]
    """Columns that the models must compute before advantages can be estimated."""
    mini_batches: int
    """Number of update batches that a step's batch is split into, each of which is then shared out over the ranks."""
    split_unit: Literal["rollout", "group"]
    """The unit that no update batch has only a part of."""
    ess_floor: float = 0.0
    """The effective sample size under which a step is warned of, as a share of its rollouts."""
    free_engine_memory: Callable[[], None] = field(default=lambda: None)
    """Makes the engine on the same device free its memory, before training begins."""
    read_images: ReadImages = field(default=lambda _: {})
    """Reads the images of rollouts, by their digests."""

    def __post_init__(self) -> None:
        self._ess_warnings = EssWarnings(self.ess_floor)
        self._step = 0

    def annotate(self, scored: Sequence[ScoredRollout], version: int) -> Batch:
        """Return the batch of these rollouts with the model columns that the run's algorithm needs.

        Their tokens may be in an object store: each rank builds its share there. version: the trainer's policy version.
        """
        rollouts = [each.rollout for each in scored]
        models = [model for each in scored for model in each.models]
        has_anchor = [has_anchor for each in scored for has_anchor in each.has_anchor]
        alternatives = [count for each in scored for count in each.alternatives]
        route_formats = [each_format for each in scored for each_format in each.route_formats]
        schema = BatchSchema.from_records(models, has_anchor, rollouts, alternatives, route_formats)
        build = partial(_build_part, schema, version)
        groups = np.unique([rollout.group for rollout in rollouts], return_inverse=True)[1]
        meta = BatchMeta.from_lengths(
            np.array([each.tokens for each in scored], np.int64),
            np.array([each.first_action for each in scored], np.int64),
            torch.from_numpy(groups.astype(np.int64)),
        )
        metadata = list(zip(rollouts, store_images(scored, self.crew, self.read_images), strict=True))
        batch = self.crew.build_batch(meta, [each.samples_ref for each in scored], build, metadata)
        self.free_engine_memory()
        return self.crew.call_for_ref(PolicyWorker.annotate, batch, self.columns) if self.columns else batch

    def estimate(self, batch: Batch, step: int) -> Batch:
        """Return the batch with corrections and advantages."""
        self._step = step
        return self.crew.call_for_ref(PolicyWorker.estimate, batch, step)

    def update(self, batch: Batch) -> Metrics:
        """Make all optimizer steps on the batch that was estimated last, and return their metrics."""
        metrics = self.crew.call(PolicyWorker.update, batch.split(self.mini_batches, by=self.split_unit))
        self._ess_warnings.check(self._step, metrics)
        return metrics

    def facts(self) -> Mapping[str, Any]:
        """Return the plain values that a checkpoint stores of the trained models."""
        return self.crew.call(PolicyWorker.facts)


def _build_part(
    schema: BatchSchema,
    version: int,
    samples: Sequence[Sequence[Sample]],
    metadata: Sequence[tuple[Rollout, Mapping[str, bytes | StoredBytes]]],
) -> Batch:
    """Return the batch of some rollouts of a step, or of none. metadata: of each, its record and its images."""
    rollouts = [rollout for rollout, _ in metadata]
    images = {digest: content for _, contents in metadata for digest, content in contents.items()}
    batch = Batch.from_records([sample for each in samples for sample in each], rollouts, schema, images)
    return batch.replace(trainer_version=batch.group.new_full((batch.num_rollouts,), version))


@dataclass
class RunComponents:
    """The components of a training loop, ready to use."""

    directory: Path
    log: RunLog
    source: Collector
    learners: Learners
    evaluate: PeriodicEvaluation
    checkpoint: CheckpointSaver
    engine: Engine
    store: Journal
    loop: LoopThread
    """The run's event loop: rollouts and evaluations run on it."""
    overlong_prompts: int
    """Number of prompts of `data.train` that were too long."""
    decode: Callable[[Ids], str]
    """Decodes token ids to text."""
    new_client: Callable[[], RolloutQueue] | None = None
    """Makes another client of the agents' rollout queue, if agents make the rollouts."""
    shown_rollouts: int = 0
    """Number of rollouts of a step that trackers get."""
    publisher: Callable[[int], Metrics] | None = None
    """Publishes a version of the weights to servers; None where the workers' own engines sample."""
    source_metrics: SourceMetrics = field(default_factory=SourceMetrics)

    def begin(self) -> None:
        """Publish the first weights, and score them if that is due.

        Engine statistics from before are discarded, as they do not belong to the run.
        """
        step = self.checkpoint.step
        self.publish(step)
        self.engine.stats()
        if self.evaluate.is_due(step):
            with self.log.step(step) as at, at.timer("evaluate"):
                at.add(self.evaluate.maybe_run(step))
                self.evaluate.raise_failed()
            self.checkpoint.mark_best(step)  # it was saved without a score if its evaluation failed

    def record_rollouts(self, step: int, groups: StepGroups, batch: Batch) -> None:
        """Write the advantage of each rollout to the journal, and give some rollouts to the trackers, if they are to
        have any. batch: with advantages."""
        if not groups.scored:
            return
        means = self.learners.crew.call(PolicyWorker.mean_advantages, batch)
        advantages = {int(name): metric.value() for name, metric in means.items()}
        values = tuple(math.nan if value is None else value for value in advantages.values())
        self.store.append([AdvantagesEstimated(step, tuple(advantages), values)])
        if self.shown_rollouts and self.log.is_written(step):
            places = choose_rollouts(groups.scored, self.shown_rollouts)
            sampled = [read_sampled(groups.scored[place], self.store, self.decode, advantages) for place in places]
            self.log.add_rollouts(step, sampled)

    def publish(self, version: int) -> Metrics:
        """Publish the weights to every engine, under a new version."""
        self.evaluate.before_publish(version)
        if self.publisher is not None:
            metrics = self.publisher(version)
        else:
            metrics = self.learners.crew.call(PolicyWorker.publish, version)
        self.source.published(version)
        return metrics

    def measure(self, groups: StepGroups) -> Metrics:
        """Return the metrics of a step's rollouts, of the engine that sampled them, and of the device."""
        with_samples = [each for each in groups.scored if each.models]
        prompts, answers = [each.prompt_tokens for each in with_samples], [each.answer_tokens for each in with_samples]
        rewards = [each.trained_reward for each in groups.scored]
        metrics = Metrics(
            {
                "reward": Mean.over(sum(rewards), len(rewards)),
                "prompt_length": Mean.over(sum(prompts), len(prompts)),
                "answer_length": Mean.over(sum(answers), len(answers)),
                "answer_length_max": Max.of(max(answers, default=0)),
                "truncated": Mean.over(sum(r.truncated for r in groups.rollouts), len(rewards)),
                "rollouts": Last.of(len(rewards)),
                "tokens": Last.of(sum(each.tokens for each in groups.scored)),
                "overlong_prompts": Last.of(self.overlong_prompts),
                "replayed": Last.of(float(groups.replayed)),
            }
        )
        for rollout in groups.rollouts:
            for name, value in rollout.parts.items():
                metrics.add(f"reward/{name}", Mean.of(value))
        metrics.merge(self.source_metrics.measure(groups.scored))
        if "turns" in groups.metrics:
            observed = sum(each.observation_tokens for each in groups.scored)
            metrics.add("observation_length", Mean.over(observed, len(rewards)))
        metrics.merge(groups.metrics)
        engine_metrics = self.engine.stats()
        drawn, busy = (engine_metrics[f"engine/{name}"].value() or 0.0 for name in ("new_tokens", "busy_seconds"))
        metrics.add("sampled_tokens_per_second", Mean.over(drawn, busy))
        metrics.merge(engine_metrics)
        metrics.merge(self.learners.crew.call(PolicyWorker.utilization))
        metrics.merge(self.checkpoint.pop_metrics())
        return metrics
