"""What a loop is made of, as the loop speaks to it; `build` decides what stands behind each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from etude.batch import Batch
from etude.checkpoint import Checkpoint, Checkpoints
from etude.observe import Last, Max, Mean, Metrics, RunLog, Sum, get_log
from etude.protocols import Crew, Generate, Ids
from etude.recipes.batching import collated
from etude.recipes.collecting import Collector, Groups, Watch
from etude.recipes.evaluate import Answer, Evaluator, scores, write_answers
from etude.recipes.saving import Saver
from etude.recipes.workers import PolicyWorker
from etude.store import Journal, events
from etude.store.desk import Desk

__all__ = ["Engine", "Learners", "Parts", "Scoring"]


class Engine(Generate, Protocol):
    """What answers, as far as the loop looks at it: one engine, or one on each rank."""

    def stats(self) -> Metrics:
        """What was done since this was last asked."""
        ...


@dataclass
class Learners:
    """The trained roles, as the loop speaks to them: one policy. What they make of a batch may stay with them."""

    crew: Crew
    columns: frozenset[str]
    """What the model itself must tell of a batch before advantages can be estimated."""
    updates: int
    """Into how many update batches a step's batch is cut, before each of them is shared out over the ranks."""
    unit: Literal["rollout", "group"]
    """What no update batch has a part of."""
    make_room: Callable[[], None] = field(default=lambda: None)
    """Has whoever shares the device give up its memory, before there is work."""

    def annotate(self, batch: Batch) -> Batch:
        """The batch with what the run's algorithms declared they need of the model. Work on a batch begins with it."""
        self.make_room()
        return self.crew.hold(PolicyWorker.annotate, batch, self.columns) if self.columns else batch

    def estimate(self, batch: Batch, step: int) -> Batch:
        """The batch with corrections and advantages."""
        return self.crew.hold(PolicyWorker.estimate, batch, step)

    def update(self, batch: Batch) -> Metrics:
        """Every optimizer step that this batch is good for."""
        return self.crew.call(PolicyWorker.update, batch.split(self.updates, by=self.unit))

    def facts(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of them in plain numbers."""
        return self.crew.call(PolicyWorker.facts)

    def save(self, checkpoints: Checkpoints, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint of them."""
        return self.crew.call(PolicyWorker.save, checkpoints, step, facts)

    def resume(self, checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
        """Go on from one."""
        self.crew.call(PolicyWorker.resume, checkpoints, checkpoint)


@dataclass
class Scoring:
    """Evaluation as the loop speaks to it: due or not, shown, written, and remembered for the best checkpoint.

    A step that the journal has a score of is not scored again.
    """

    evaluator: Evaluator | None
    directory: Path
    steps: int
    store: Journal
    engine: Engine
    measured: str
    """What the scores are measured with, as the journal names it."""
    watch: Watch
    """Shows how far the answers have come."""
    found: dict[int, float] = field(default_factory=dict)
    """The score of each step, where nothing failed."""
    failure: Exception | None = None
    """What ended the last evaluation, until it is raised."""

    def due(self, step: int) -> bool:
        """Whether to score after this step."""
        return self.evaluator is not None and self.evaluator.due(step, self.steps)

    def maybe_run(self, step: int) -> Metrics:
        """Score the policy if this step asks for it. Should that fail, the step itself is still to be saved: what
        happened is kept until `raise_failed`."""
        if self.evaluator is None or not self.due(step):
            return Metrics()
        scored = self._known(step)
        metrics = Metrics()
        if scored is None:
            try:
                wanted = self.evaluator.tasks * self.evaluator.samples
                with self.watch(f"step {step}: answers to score", wanted) as bar:
                    answers = self.evaluator.answers(bar.advance, step=step)
            except Exception as error:
                self.failure = error
                return Metrics()
            scored = scores(answers)
            self._keep(step, answers, scored)
            beside = {**self.engine.stats(), **self.evaluator.spent()}
            metrics.merge({f"eval/{name}": metric for name, metric in beside.items()})
        metrics.merge(scored)
        self._remember(step, scored.reduce(), self.evaluator)
        return metrics

    def raise_failed(self) -> None:
        """Raise what ended the last evaluation, if anything did."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def best(self, step: int) -> float | None:
        """The score at a step, where there was one."""
        return self.found.get(step)

    def _known(self, step: int) -> Metrics | None:
        """What the journal has of a step, measured as now."""
        for _, event in self.store.read(kinds=(events.Evaluated,)):
            if isinstance(event, events.Evaluated) and (event.step, event.name) == (step, self.measured):
                counts = {name for name in event.scores if name.endswith("/failed")}
                return Metrics({n: Sum.of(v) if n in counts else Mean.of(v) for n, v in event.scores.items()})
        return None

    def _remember(self, step: int, scored: Mapping[str, float], evaluator: Evaluator) -> None:
        failed, log = int(scored["eval/failed"]), get_log("recipes")
        score = scored[f"eval/mean@{evaluator.samples}"]
        if failed:
            log.warning(
                "%d of %d answers that were to be scored after step %d failed and count as 0: the score is too low, "
                "and marks no best checkpoint. Each says why in `evaluations`.",
                *(failed, evaluator.tasks * evaluator.samples, step),
            )
        else:
            self.found[step] = score
        if step == 0:
            log.info("Before training, the score is %.4g on %d tasks.", score, evaluator.tasks)

    def _keep(self, step: int, answers: list[Answer], scored: Metrics) -> None:
        write_answers(answers, self.directory / "evaluations" / f"step-{step:08d}.jsonl")
        self.store.append([events.Evaluated(step, self.measured, dict(scored.reduce()))])


@dataclass
class Parts:
    """The parts of a loop, ready."""

    directory: Path
    log: RunLog
    source: Collector
    learners: Learners
    evaluate: Scoring
    checkpoint: Saver
    engine: Engine
    store: Journal
    runner: asyncio.Runner
    """The run's one event loop."""
    overlong: int
    """How many prompts of `data.train` were too long."""
    text: Callable[[Ids], str]
    """What ids say, in words."""
    client: Callable[[], Desk] | None = None
    """Another desk at the rollouts of agents, where those play."""
    publisher: Callable[[int], Metrics] | None = None
    """Who brings weights to the engine under a version, where the workers' own engines are not it."""

    def begin(self) -> None:
        """Publish the weights that the run begins with, and score them if that is asked for: a line of its own. What
        the engine did before is no part of the run."""
        step = self.checkpoint.step
        self.publish(step)
        self.engine.stats()
        if self.evaluate.due(step):
            with self.log.step(step) as at, at.timer("evaluate"):
                at.add(self.evaluate.maybe_run(step))
                self.evaluate.raise_failed()
            self.checkpoint.mark_best(step)  # it was saved without a score, if its evaluation had failed

    def collate(self, groups: Groups) -> Batch:
        """One batch of a step's groups, which ranks make where its tokens do not lie here."""
        return collated(self.learners.crew, groups.rows, groups.rollouts, self.checkpoint.step)

    def publish(self, version: int) -> Metrics:
        """Hand the weights to every engine, under a new version."""
        if self.publisher is not None:
            return self.publisher(version)
        return self.learners.crew.call(PolicyWorker.publish, version)

    def measure(self, groups: Groups) -> Metrics:
        """What is seen of a step's rollouts, of the engine that drew them, and of the device."""
        there = [rows for rows in groups.rows if rows.models]
        prompts, answers = [rows.prompt for rows in there], [rows.answered for rows in there]
        pairs = zip(groups.rows, groups.rollouts, strict=True)
        rewards = [rows.metric(rollout.reward) for rows, rollout in pairs]
        metrics = Metrics(
            {
                "reward": Mean.over(sum(rewards), len(rewards)),
                "prompt_length": Mean.over(sum(prompts), len(prompts)),
                "answer_length": Mean.over(sum(answers), len(answers)),
                "answer_length_max": Max.of(max(answers, default=0)),
                "truncated": Mean.over(sum(r.truncated for r in groups.rollouts), len(rewards)),
                "rollouts": Last.of(len(rewards)),
                "tokens": Last.of(sum(rows.tokens for rows in groups.rows)),
                "overlong_prompts": Last.of(self.overlong),
                "replayed": Last.of(float(groups.replayed)),
            }
        )
        for rollout in groups.rollouts:
            for name, value in rollout.parts.items():
                metrics.add(f"reward/{name}", Mean.of(value))
        if "turns" in groups.metrics:
            metrics.add("observation_length", Mean.over(sum(rows.observed for rows in groups.rows), len(rewards)))
        metrics.merge(groups.metrics)
        seen = self.engine.stats()
        drawn, busy = (seen[f"engine/{name}"].value() or 0.0 for name in ("new_tokens", "busy_seconds"))
        metrics.add("sampled_tokens_per_second", Mean.over(drawn, busy))
        metrics.merge(seen)
        metrics.merge(self.learners.crew.call(PolicyWorker.utilisation))
        metrics.merge(self.checkpoint.spent())
        return metrics
