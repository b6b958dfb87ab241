"""The scoring of a run on `data.val`: while the trainer waits, or beside it.

between   the trainer waits. The weights stay, because only the trainer publishes new ones
beside    the trainer goes on. Servers keep the adapter of the scored version for a number of publishes. The publish
          that would unload it waits for the end of the evaluation
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from etude.observe import Mean, Metrics, Sum, get_logger
from etude.recipes.collect.collector import ProgressFactory
from etude.recipes.evaluate import EvaluatedAnswer, Evaluator, compute_scores, write_answers
from etude.store import Journal
from etude.store.journal import events


@dataclass
class PeriodicEvaluation:
    """Evaluation, as the loop calls it: checks if it is due, runs it, writes its answers, and keeps scores for the best
    checkpoint.

    A step whose score is in the journal is not scored again. One evaluation runs at a time.
    """

    evaluator: Evaluator | None
    directory: Path
    steps: int
    store: Journal
    engine_stats: Callable[[], Metrics]
    evaluation_id: str
    """The id of the way in which scores are measured, as in the journal."""
    progress: ProgressFactory
    """Makes the progress bar of the answers."""
    shares_engine: bool = False
    """True if rollouts are made during an evaluation. The work of engine and judge then counts for the next step."""
    kept_versions: int = 0
    """The number of policy versions that the engine keeps, where an evaluation runs beside the trainer; else 0."""
    add_late: Callable[[int, Metrics], None] = lambda _, __: None
    """Writes metrics of a step that has ended."""
    mark_best: Callable[[int, float, str], object] = lambda _step, _score, _measured: None
    """Marks the checkpoint of a step as the best, if there is one and this score, measured so, is."""
    scores: dict[int, float] = field(default_factory=dict)
    """The score of each step in whose evaluation nothing failed."""
    failure: tuple[int, Exception] | None = None
    """The step whose evaluation failed, and the error, until it is raised."""
    beside: tuple[int, Future[list[EvaluatedAnswer]]] | None = None
    """The step that is scored beside the trainer, and its answers."""

    def is_due(self, step: int) -> bool:
        """Return whether to score after this step."""
        return self.evaluator is not None and self.evaluator.is_due(step, self.steps)

    def maybe_run(self, step: int) -> Metrics:
        """Score the policy if it is due after this step, and return its scores. Beside the trainer, only begin to.

        If scoring fails, the step itself must still be saved, so the error is kept until `raise_failed`.
        """
        if self.beside is not None and (self.beside[1].done() or self.is_due(step)):
            self.finish()
        if self.evaluator is None or self.failure is not None or not self.is_due(step):
            return Metrics()
        scored = self._read_scores(step)
        if scored is None and self.kept_versions and step < self.steps:
            self.beside = step, self.evaluator.begin(step=step)
            return Metrics()
        metrics = Metrics()
        if scored is None:
            try:
                num_answers = self.evaluator.tasks * self.evaluator.samples
                with self.progress(f"step {step}: answers to score", num_answers) as bar:
                    answers = self.evaluator.answer_all(bar.advance, step=step)
            except Exception as error:
                self.failure = step, error
                return Metrics()
            scored = self._record(step, answers)
            if not self.shares_engine:
                work = {**self.engine_stats(), **self.evaluator.pop_metrics()}
                metrics.merge({f"eval/{name}": metric for name, metric in work.items()})
        metrics.merge(scored)
        self._remember(step, scored.reduce(), self.evaluator)
        return metrics

    def before_publish(self, version: int) -> None:
        """Wait for the evaluation beside the trainer, if the engine would lose its weights with this version."""
        if self.beside is not None and version >= self.beside[0] + self.kept_versions:
            self.finish()

    def before_save(self, step: int) -> None:
        """Wait for the evaluation of an earlier step: a run that resumes from this one's checkpoint would not score
        it. Raise the error of an earlier step's evaluation, so that it is repeated."""
        if self.beside is not None and self.beside[0] < step:
            self.finish()
        if self.failure is not None and self.failure[0] < step:
            self.raise_failed()

    def finish(self) -> None:
        """Wait for the evaluation beside the trainer, and write its scores under its own step."""
        if self.beside is None or self.evaluator is None:
            return
        (step, future) = self.beside
        self.beside = None
        try:
            answers = self.evaluator.wait_for(future)
        except Exception as error:
            self.failure = step, error
            return
        scored = self._record(step, answers)
        self._remember(step, scored.reduce(), self.evaluator)
        self.add_late(step, scored)
        score = self.score_at(step)
        if score is not None and step > 0:
            self.mark_best(step, score, self.evaluation_id)

    def raise_failed(self) -> None:
        """Raise the error that ended the last evaluation, if there is one."""
        failure = self.failure
        self.failure = None
        if failure is not None:
            raise failure[1]

    def score_at(self, step: int) -> float | None:
        """Return the score at a step, or None."""
        return self.scores.get(step)

    def _read_scores(self, step: int) -> Metrics | None:
        """Return the scores that the journal has of a step, measured in the same way as now."""
        for _, event in self.store.read(kinds=(events.PolicyEvaluated,)):
            if isinstance(event, events.PolicyEvaluated) and (event.step, event.name) == (step, self.evaluation_id):
                counts = {name for name in event.scores if name.endswith("/failed")}
                return Metrics({n: Sum.of(v) if n in counts else Mean.of(v) for n, v in event.scores.items()})
        return None

    def _remember(self, step: int, scored: Mapping[str, float], evaluator: Evaluator) -> None:
        failed, log = int(scored["eval/failed"]), get_logger("recipes")
        score = scored[f"eval/mean@{evaluator.samples}"]
        if failed:
            log.warning(
                "%d of %d answers that were to be scored after step %d failed and count as 0. So the score is too "
                "low, and marks no best checkpoint. Each says why in `evaluations`.",
                failed,
                evaluator.tasks * evaluator.samples,
                step,
            )
        else:
            self.scores[step] = score
        if step == 0:
            log.info("Before training, the score is %.4g on %d tasks.", score, evaluator.tasks)

    def _record(self, step: int, answers: list[EvaluatedAnswer]) -> Metrics:
        """Write the answers and their scores, and return the scores."""
        scored = compute_scores(answers)
        write_answers(answers, self.directory / "evaluations" / f"step-{step:08d}.jsonl")
        self.store.append([events.PolicyEvaluated(step, self.evaluation_id, dict(scored.reduce()))])
        return scored
