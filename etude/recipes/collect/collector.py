"""Collects the groups of a training step, from any kind of rollout source (`sources`).

    scheduler ─IssueRollout─► an attempt, judged ─► journal ─► scheduler ─AdmitStep─► samples and rollouts

Every rollout is written to the journal before it counts, and so is the admission that ends a step. So a killed run
resumes with exactly what it had: admitted steps are replayed, scored rollouts used, unfinished ones issued again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etude.data import Dataset, RowOrder
from etude.data.samples import build_samples as rows_of_turns
from etude.errors import CollectionError
from etude.observe import Mean, Metrics, null_progress
from etude.recipes.collect.agent_rollouts import FIRST_EVALUATION_ORDINAL
from etude.recipes.collect.config import CollectionConfig
from etude.recipes.collect.player import AttemptResult
from etude.recipes.collect.rollout_rows import PutSamples, RolloutRows, ScoredRollout
from etude.recipes.collect.rollout_source import ProgressFactory, StepGroups
from etude.recipes.collect.scheduler import (
    AdmitStep,
    AttemptFailed,
    CollectionScheduler,
    Decision,
    DropTask,
    IssueRollout,
    OpenGroup,
    RolloutFinished,
    StepOpened,
    VersionPublished,
)
from etude.recipes.collect.statistics import CollectionStatistics, CollectionWarnings
from etude.records import Outcome, Rollout, Sample, Task, Turn
from etude.rewards import Judge
from etude.store import Journal, JournalMark, Phase, RolloutState, TaskState, events

__all__ = ["Collector", "FinishedAttempt", "row_of"]


@dataclass(frozen=True, slots=True, eq=False)
class FinishedAttempt:
    """The end of one attempt."""

    task: int
    sample: int
    result: AttemptResult


class Collector(ABC):
    """Collects the groups of a step. A subclass makes the attempts and defines their events in the journal.

    Consumes tasks in the run's order. Waits for attempts, each of which has its own timeout. Unblocked by the first
    attempt that ends. Attempts that end together are passed to the scheduler in the order of their ordinals.
    """

    def __init__(
        self,
        collection: CollectionConfig,
        *,
        seed: int,
        dataset: Dataset,
        order: RowOrder,
        judge: Judge,
        store: Journal,
        runner: asyncio.Runner,
        retries: int,
        episodic: bool,
        greedy: bool = False,
        min_group_size: int = 1,
        code_changed: bool = False,
        keep: PutSamples = tuple,
    ) -> None:
        """runner: the run's only event loop. retries: further attempts that the scheduler asks for. episodic: attempts
        may have several turns. greedy: each task gets one greedy answer too, as a baseline. min_group_size: a group
        with fewer scored rollouts has failed. code_changed: the code of the agent or the reward changed since the run
        was started. keep: stores the samples of rollouts; by default in this process."""
        self._config, self._seed, self._greedy, self._retries = collection, seed, greedy, retries
        self._dataset, self._order, self._store, self._judge = dataset, order, store, judge
        self._episodic, self._min_group = episodic, min_group_size
        self._code_changed, self._put_samples = code_changed, keep
        self._tasks: dict[int, Task] = {}
        self._scored: dict[int, ScoredRollout] = {}
        self._unstored: list[int] = []
        """The ids of scored rollouts whose samples are not stored yet."""
        self._baselines: dict[int, float] = {}
        """The reward of the greedy answer to each open task."""
        self._admitted: dict[int, tuple[int, ...]] = {}
        self._dropped: dict[int, list[TaskState]] = {}
        self._dropped_before_stop: list[TaskState] = []
        """Tasks that were dropped in the step that was open when the run stopped."""
        self._open_tasks: list[TaskState] = []
        self._statistics = CollectionStatistics()
        self._runner = runner
        self._warnings = CollectionWarnings(one_by_one=judge.one_by_one, pays=judge.has_reward)
        self.progress: ProgressFactory = null_progress
        """Makes the progress bar of a step's answers."""
        self._scheduler = self._fresh_scheduler(0, 0)

    # -- implemented by a source --------------------------------------------------------------------------------------

    @abstractmethod
    def _start_events(self, issue: IssueRollout) -> list[events.Event]:
        """Return the events that are written before an attempt starts."""

    @abstractmethod
    async def _issue_attempts(self, issues: Sequence[IssueRollout]) -> None:
        """Prepare several attempts at once, before `_run_attempt` is called for each."""

    @abstractmethod
    async def _run_attempt(self, task: int, sample: int) -> FinishedAttempt:
        """Make one attempt at a rollout, to its end."""

    @abstractmethod
    def _end_events(self, end: FinishedAttempt, retry: bool) -> list[events.Event]:
        """Return the events of an attempt that ended."""

    @abstractmethod
    def _recover(self, state: RolloutState) -> int | None:
        """Prepare to retry a rollout that was left without a score. Return its number of failures, or None for no
        retry."""

    def _metrics(self) -> Metrics:
        """Return further metrics of a step's rollouts."""
        return Metrics()

    # -- called by the loop -------------------------------------------------------------------------------------------

    def next(self, step: int) -> StepGroups:
        """Return the groups of this step: from the journal if it was admitted before, else sampled and judged now."""
        if step in self._admitted:
            return self._replay_step(step, self._admitted.pop(step))
        self._statistics = CollectionStatistics()
        for task in (*self._dropped_before_stop, *self._open_tasks):
            self._statistics.add_interrupted(task, map(self._store.rollout, task.rollouts))
        self._restore_tasks(self._dropped_before_stop, self._open_tasks)
        self._dropped_before_stop, self._open_tasks = [], []
        num_answers = self._config.tasks * self._rollouts_per_task
        with self.progress(f"step {step}: answers", num_answers) as bar:
            admit = self._runner.run(self._collect(step, bar.advance))
        ids = [self._id(task, sample) for task, samples in admit.tasks.items() for sample in samples]
        if not ids:
            error = self._statistics.error
            between = "\n" if "\n" in error else " "  # a traceback ends with a line break
            raise CollectionError(
                f"Step {step} has nothing to train on: each of {self._statistics.dropped.total()} tasks failed. The "
                f"last failure: {error}{between}Fix that; a run that is started again goes on from here."
            )
        self._store.append([events.RolloutsAdmitted(step, tuple(ids))])
        scored = [self._scored.pop(rollout) for rollout in ids]
        self._warnings.warn_about_step(
            step,
            self._statistics,
            [rollout.total for rollout in scored],
            zero_variance=admit.zero_variance == len(admit.tasks),
        )
        metrics = self._statistics.metrics(episodic=self._episodic)
        metrics.merge(self._judge.pop_metrics())
        metrics.merge(self._metrics())
        return self._groups(scored, metrics)

    def disable_refill(self) -> None:
        """Make each step ask its first `collect.tasks` tasks alone, and no other in place of one that failed."""
        self._scheduler.max_tasks = self._config.tasks

    @property
    def last_replayed_step(self) -> int:
        """The last step that was admitted before and is read back from the journal; 0 if there is none."""
        return max(self._admitted, default=0)

    def mark(self) -> tuple[dict[str, Any], JournalMark]:
        """Return the position of the order of tasks and of the journal, at one moment, for a checkpoint."""
        return self._order.state(), self._store.flush()

    def resume_from(self, step: int, state: Mapping[str, Any] | None, mark: JournalMark) -> None:
        """Resume at the checkpoint of this step, state and mark (0 and None: at the beginning).

        Later steps of the journal are replayed, scored rollouts are used, unfinished ones are issued again. A
        checkpoint that was saved during a replay has later steps before its mark.
        """
        admitted_at, dropped = 0, []
        for position, event in self._store.read(kinds=(events.RolloutsAdmitted, events.TaskDropped)):
            match event:
                case events.RolloutsAdmitted(step=trained, rollouts=rollouts) if trained > step:
                    self._admitted[trained] = rollouts
                case events.RolloutsAdmitted(step=trained) if trained == step:
                    admitted_at = position
                case events.TaskDropped(task=task, step=left_by) if left_by > step and task < FIRST_EVALUATION_ORDINAL:
                    dropped.append((left_by, task))
        self._store.verify_mark(mark, admitted_at)
        for left_by, task in dropped:
            self._dropped.setdefault(left_by, []).append(self._store.task(task))
        if state is not None:
            self._order.restore(state)
        first = self._order.position
        for issued in self._store.iter_states(TaskState, first - 1):
            if issued.id >= FIRST_EVALUATION_ORDINAL:
                break
            first = issued.id + 1
        self._open_tasks = [task for task in self._store.tasks(Phase.OPEN) if task.id < FIRST_EVALUATION_ORDINAL]
        self._scheduler = self._fresh_scheduler(first, max(self._admitted, default=step))
        line = self._read_open_work()
        self._dropped_before_stop = [
            task for left_by, tasks in self._dropped.items() if left_by not in self._admitted for task in tasks
        ]
        # Failures from before the code changed do not count: the step may ask for as many tasks again.
        if not self._code_changed:
            line += [OpenGroup(task.id, dropped=True) for task in self._dropped_before_stop]
        self._scheduler.resume(line)

    def _read_open_work(self) -> list[OpenGroup]:
        """Return the open tasks: the scores of their rollouts, and those without a score with the number of their
        failures."""
        metrics: dict[int, dict[int, float]] = {task.id: {} for task in self._open_tasks}
        held: dict[int, dict[int, int]] = {task.id: {} for task in self._open_tasks}
        for state in self._store.rollouts(Phase.QUEUED, Phase.RUNNING, Phase.FINISHED):
            if state.task >= FIRST_EVALUATION_ORDINAL:
                continue
            if state.phase is Phase.FINISHED and self._has_score(state):
                scored_rollout = self._read_scored(state)
                metrics[state.task][state.sample] = scored_rollout.metric
                if state.sample < self._config.group_size:
                    self._scored[state.id] = scored_rollout.stored(self._put_samples)
                else:
                    self._baselines[state.task] = scored_rollout.total
            elif (failed := self._recover(state)) is not None:
                held[state.task][state.sample] = failed
        return [OpenGroup(task, metrics[task], held[task]) for task in metrics]

    def _has_score(self, ended: RolloutState) -> bool:
        """Return whether a rollout that ended has its score in the journal."""
        return ended.last is not None and ended.last.total is not None

    # -- collecting ---------------------------------------------------------------------------------------------------

    async def _collect(self, step: int, on_answer: Callable[[], None]) -> AdmitStep:
        """Carry out the scheduler's decisions until it admits the step. Each decision is written before it is carried
        out. `on_answer` is called after each answer."""
        published = self._scheduler.handle(VersionPublished(step - 1, step - 1))
        decisions: list[Decision] = [*published, *self._scheduler.handle(StepOpened(step))]
        written: list[events.Event] = []
        running: set[asyncio.Task[FinishedAttempt]] = set()
        ended: asyncio.Queue[asyncio.Task[FinishedAttempt]] = asyncio.Queue()
        try:
            while True:
                written += self._decision_events(step, decisions)
                if written:
                    self._store.append(written)
                written = []
                self._store_rows()
                issues = [decision for decision in decisions if isinstance(decision, IssueRollout)]
                if issues:
                    await self._issue_attempts(issues)
                for issue in issues:
                    attempt = asyncio.create_task(self._run_attempt(issue.task, issue.sample))
                    attempt.add_done_callback(ended.put_nowait)
                    running.add(attempt)
                for decision in decisions:
                    if isinstance(decision, AdmitStep):
                        return decision
                assert running, "the scheduler waits for nothing"
                done = [await ended.get()]
                while not ended.empty():
                    done.append(ended.get_nowait())
                running.difference_update(done)
                results = await asyncio.gather(*done)
                for end in results:
                    if end.result.verdict.outcome is Outcome.SUCCEEDED:
                        on_answer()
                decisions, written = self._handle_ended(sorted(results, key=lambda end: (end.task, end.sample)))
                del done, results  # frees their tokens, which are written and stored next
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _handle_ended(self, ended: Sequence[FinishedAttempt]) -> tuple[list[Decision], list[events.Event]]:
        """Return the scheduler's decisions about attempts that ended, and the events to write."""
        decisions: list[Decision] = []
        written: list[events.Event] = []
        for end in ended:
            result, verdict = end.result, end.result.verdict
            self._statistics.add_attempt(result)
            if verdict.error:
                self._statistics.add_failure(verdict.outcome, verdict.error)
            if verdict.outcome is Outcome.SUCCEEDED:
                self._count(end)
                metric = self._config.group_metric(end.task, verdict.parts, result.total, verdict.error)
                follows = self._scheduler.handle(RolloutFinished(end.task, end.sample, metric))
            else:
                follows = self._scheduler.handle(AttemptFailed(end.task, end.sample, verdict.error))
            again = [(issue.task, issue.sample) for issue in follows if isinstance(issue, IssueRollout)]
            written += self._end_events(end, (end.task, end.sample) in again)
            decisions += follows
        return decisions, written

    def _count(self, end: FinishedAttempt) -> None:
        """Keep the score of a rollout, to train on it or as a baseline."""
        result, id = end.result, self._id(end.task, end.sample)
        if end.sample == self._config.group_size:
            self._baselines[end.task] = result.total
            return
        self._scored[id] = self._scored_rollout(result, id, end.task)
        self._unstored.append(id)

    def _store_rows(self) -> None:
        """Store the samples of rollouts that were written since the last call, and free them here."""
        for id in self._unstored:
            if id in self._scored:  # else its task was dropped
                self._scored[id] = self._scored[id].stored(self._put_samples)
        self._unstored.clear()

    def _decision_events(self, step: int, decisions: Sequence[Decision]) -> list[events.Event]:
        """Return the events of decisions: tasks issued, attempts started, tasks dropped."""
        written: list[events.Event] = []
        for decision in decisions:
            match decision:
                case IssueRollout():
                    written += self._start_events(decision)
                case DropTask(task, cause):
                    self._statistics.dropped[cause] += 1
                    written.append(events.TaskDropped(task, step, cause))
                    earned = [self._scored[id].total for id in self._ids(task) if id in self._scored]
                    self._order.record_rewards(row_of(self._tasks.pop(task)), earned)
                    self._forget(task)
                case AdmitStep(_, tasks):
                    for task in tasks:
                        self._forget(task, but=tasks[task])
        return written

    # -- small parts --------------------------------------------------------------------------------------------------

    def _fresh_scheduler(self, first: int, step: int) -> CollectionScheduler:
        config = self._config
        return CollectionScheduler(
            tasks=config.tasks,
            group_size=config.group_size,
            refill=config.refill,
            retries=self._retries,
            first=first,
            step=step,
            greedy=self._greedy,
            min_group_size=self._min_group,
        )

    @property
    def _rollouts_per_task(self) -> int:
        """The number of rollouts of a task, the greedy one included."""
        return self._config.group_size + self._greedy

    def _id(self, task: int, sample: int) -> int:
        """Return the id of a rollout, which is unique in the run."""
        return task * self._rollouts_per_task + sample

    def _ids(self, task: int) -> list[int]:
        """Return the ids of a task's rollouts, the greedy one included."""
        return [self._id(task, sample) for sample in range(self._rollouts_per_task)]

    def _forget(self, task: int, but: Sequence[int] = ()) -> None:
        """Drop the state of a task that is settled. but: samples whose scores are still needed."""
        for sample, id in enumerate(self._ids(task)):
            if sample not in but:
                self._scored.pop(id, None)
        if not but:
            self._baselines.pop(task, None)

    def _restore_tasks(self, dropped: Sequence[TaskState], others: Sequence[TaskState]) -> None:
        """Move the order of tasks past those that were issued before the restart, and record the rewards of the dropped
        ones."""
        for task in sorted((*dropped, *others), key=lambda task: task.id):
            if task.id >= self._order.position:
                self._order.replay(task.id, task.row)
            self._tasks[task.id] = task.task
        size = self._config.group_size
        for task in dropped:
            tries = [state for state in map(self._store.rollout, task.rollouts) if state.sample < size]
            earned = [self._read_scored(state).total for state in tries if self._has_score(state)]
            self._order.record_rewards(row_of(self._tasks.pop(task.id)), earned)

    def _task(self, ordinal: int) -> Task:
        """Return the task of an ordinal: one that was issued before, or the next in the run's order."""
        if ordinal not in self._tasks:
            self._tasks[ordinal] = self._dataset.task(self._order.advance_to(ordinal), ordinal)
        return self._tasks[ordinal]

    def _scored_rollout(self, result: AttemptResult, id: int, task: int) -> ScoredRollout:
        """Return a rollout that a step may train on, from the result of its attempt."""
        verdict = result.verdict
        scored = verdict.reward, verdict.parts, Outcome.SUCCEEDED, result.truncated, result.role
        return self._score_turns(result.turns, Rollout(id, task, task, *scored), result.total, verdict.error)

    def _score_turns(self, turns: Sequence[Turn], rollout: Rollout, total: float, error: str) -> ScoredRollout:
        metric = self._config.group_metric(rollout.task, rollout.parts, total, error)
        return ScoredRollout(
            len(turns), RolloutRows.from_samples(self._samples(turns, rollout.id)), rollout, total, metric
        )

    def _samples(self, turns: Sequence[Turn], rollout: int) -> list[Sample]:
        """Return the token sequences of a rollout to train on."""
        return rows_of_turns(turns, rollout)

    def _read_scored(self, state: RolloutState) -> ScoredRollout:
        """Read a scored rollout from the journal."""
        last = state.last
        assert last is not None and last.reward is not None and last.total is not None
        scored = last.reward, last.parts, Outcome.SUCCEEDED, last.truncated, last.role
        rollout = Rollout(state.id, state.task, state.task, *scored)
        return self._score_turns(self._store.turns(state.id), rollout, last.total, last.error)

    def _replay_step(self, step: int, ids: Sequence[int]) -> StepGroups:
        """Return a step that was admitted before, with the same rollouts, and record its rewards in the order as it did
        then."""
        states = [self._store.rollout(id) for id in ids]
        admitted = [self._store.task(task) for task in {state.task for state in states}]
        self._restore_tasks(self._dropped.pop(step, []), admitted)
        for task in {state.task for state in states} if self._greedy else ():
            last = self._store.rollout(self._id(task, self._config.group_size)).last
            assert last is not None and last.total is not None, "a task without its greedy answer is dropped"
            self._baselines[task] = last.total
        scored = [self._read_scored(state).stored(self._put_samples) for state in states]
        return self._groups(scored, Metrics(), replayed=True)

    def _groups(self, scored: Sequence[ScoredRollout], metrics: Metrics, *, replayed: bool = False) -> StepGroups:
        """Build the records of an admission, and record the rewards of its rows in the order."""
        earned: dict[int, list[float]] = {}
        rollouts = self._warnings.fill_missing_parts([scored_rollout.rollout for scored_rollout in scored])
        for scored_rollout in scored:
            earned.setdefault(scored_rollout.rollout.task, []).append(scored_rollout.total)
        if self._episodic:
            metrics.add("turns", Mean.over(sum(scored_rollout.turns for scored_rollout in scored), len(scored)))
        if self._greedy:
            baselines = {task: self._baselines.pop(task) for task in earned}
            rollouts = [replace(rollout, greedy_reward=baselines[rollout.task]) for rollout in rollouts]
            metrics.add("greedy_reward", Mean.over(sum(baselines.values()), len(baselines)))
        for task, rewards in earned.items():
            self._order.record_rewards(row_of(self._tasks.pop(task)), rewards)
        return StepGroups([scored_rollout.rows for scored_rollout in scored], rollouts, metrics, replayed)


def row_of(task: Task) -> int:
    """Return the row of the dataset that a task was made from."""
    row = task.fields["row"]
    assert isinstance(row, int)
    return row
