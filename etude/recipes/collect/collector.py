"""Collects the groups of training steps from the rollouts that it requests.

    scheduler ─IssueRollout─► rollout queue ─► journal ─► scheduler ─AdmitStep─► groups of a step

Every rollout is written to the journal before it counts, and so is the admission that ends a step. So a killed run
resumes with exactly what it had: admitted steps are replayed, scored rollouts used, unfinished ones issued again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from etude.data import Dataset, RowOrder
from etude.observe import Last, ProgressReporter, get_logger, null_progress
from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.collect.resume import (
    JournalRemainder,
    next_ordinal,
    read_open_rollouts,
    read_remainder,
    unread_version,
)
from etude.recipes.collect.rollouts import (
    IssuedTasks,
    PlayedRollout,
    PutSamples,
    ScoredRollout,
    StepGroups,
)
from etude.recipes.collect.scheduler import (
    OUTDATED,
    AdmitStep,
    CollectionScheduler,
    Decision,
    DropTask,
    IssueRollout,
    OpenGroup,
    RolloutFailed,
    RolloutFinished,
    SchedulerEvent,
    StepOpened,
    VersionPublished,
)
from etude.recipes.collect.statistics import CollectionStatistics
from etude.recipes.collect.step_groups import StepGroupsBuilder
from etude.recipes.event_loop import LoopThread
from etude.records import Task
from etude.rewards import Judge
from etude.store import Journal, JournalMark, TaskState
from etude.store.journal import events
from etude.store.queue.rollout_queue import RolloutRequest

ProgressFactory = Callable[[str, float], AbstractContextManager[ProgressReporter]]
REPORT_S = 60.0
"""Seconds after which a step that still waits says for which rollouts."""


class Collector:
    """Collects the groups of each step, as the scheduler decides.

    Consumes tasks in the run's order. One task of the run's event loop carries out the decisions, for the life of the
    run. Waits for the requested rollouts, each bounded by
    its limits. Rollouts that end together are passed to the scheduler
    in the order of their ordinals.
    """

    def __init__(
        self,
        requested: RequestedRollouts,
        builder: StepGroupsBuilder,
        *,
        dataset: Dataset,
        order: RowOrder,
        judge: Judge,
        store: Journal,
        loop: LoopThread,
        min_group_size: int = 1,
        code_changed: bool = False,
        last_step: int | None = None,
        keep: PutSamples = tuple,
    ) -> None:
        """builder: builds the records of rollouts. If it allows stale ones, rollouts are made while the trainer
        computes. loop: the run's event loop. min_group_size: a group with fewer scored rollouts has failed.
        code_changed: the code of the agent or the reward changed since the run was started. last_step: the run's last
        step. keep: stores the samples of rollouts; by default in this process."""
        self._config = builder.collection
        self._requested = requested
        self._builder = builder
        self._tasks = IssuedTasks(dataset, order)
        self._store = store
        self._judge = judge
        self._min_group = min_group_size
        self._code_changed = code_changed
        self._put_samples = keep
        self._staleness = builder.max_staleness
        self._last_step = last_step
        self._scored: dict[int, ScoredRollout] = {}
        self._baselines: dict[int, float] = {}
        """The reward of the greedy answer to each open task."""
        self._remainder = JournalRemainder()
        self._statistics = CollectionStatistics()
        self.progress: ProgressFactory = null_progress
        """Makes the progress bar of a step's answers."""
        self._on_answer: Callable[[], None] = lambda: None
        self._loop = loop
        self._posts: asyncio.Queue[SchedulerEvent | asyncio.Task[PlayedRollout]] = asyncio.Queue()
        """What the collecting task has not dealt with: steps that opened, and rollouts that ended."""
        self._collecting: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        """The error that ended the collecting task. The order of tasks may be ahead of the journal since."""
        self._admission: asyncio.Future[StepGroups] | None = None
        self._issuing = asyncio.Lock()
        """Held from the choice of tasks until they are in the journal."""
        self._next_step = 1
        """The step that is admitted next."""
        self._scheduler = self._fresh_scheduler(0, 0)

    # -- called by the loop -------------------------------------------------------------------------------------------

    def next(self, step: int) -> StepGroups:
        """Return the groups of this step: from the journal if it was admitted before, else sampled and judged now."""
        if step in self._remainder.admitted:
            return self._loop.run(self._replay_step(step))
        with self.progress(f"step {step}: answers", self._config.tasks * self._rollouts_per_task) as bar:
            self._on_answer = bar.advance
            groups = self._loop.run(self._open_step(step))
        self._on_answer = lambda: None
        return groups

    def published(self, version: int) -> None:
        """Record that every engine computes with this version, and issue what may train on it.

        Raises the error that ended the collecting, as `mark` does.
        """

        async def record() -> None:
            self._raise_failure()
            self._store.append([events.PolicyPublished(version, version)])
            if not self._remainder.admitted:  # else its rollouts would come before those that are replayed
                self._restore_open_tasks()
                self._posts.put_nowait(VersionPublished(version, version))

        self._loop.run(record())

    def disable_refill(self) -> None:
        """Make each step ask its first `collect.tasks` tasks alone, and no other in place of one that failed."""
        self._scheduler.max_tasks = self._config.tasks

    @property
    def last_replayed_step(self) -> int:
        """The last step that was admitted before and is read back from the journal; 0 if there is none."""
        return max(self._remainder.admitted, default=0)

    def mark(self) -> tuple[dict[str, Any], JournalMark]:
        """Return the position of the order of tasks and of the journal, at one moment, for a checkpoint."""

        async def at_one_moment() -> tuple[dict[str, Any], JournalMark]:
            async with self._issuing:
                self._raise_failure()  # a checkpoint with this order would lose the tasks that were not written
                if not self._remainder.admitted:  # else the order gets the rewards of open tasks after the replay
                    self._restore_open_tasks()
                return self._tasks.order.state(), self._store.flush()

        return self._loop.run(at_one_moment())

    def resume_from(self, step: int, state: Mapping[str, Any] | None, mark: JournalMark) -> None:
        """Resume at the checkpoint of this step, state and mark (0 and None: at the beginning).

        Later steps of the journal are replayed, scored rollouts are used, unfinished ones are issued again.
        """
        self._remainder = read_remainder(self._store, step, mark)
        if state is not None:
            self._tasks.order.restore(state)
        if self._staleness or self._remainder.is_interleaved(self._store):
            self._tasks.replay(self._remainder.tasks(self._store))
        first = next_ordinal(self._store, self._tasks.order.position)
        last_admitted = max(self._remainder.admitted, default=step)
        self._next_step = last_admitted + 1
        self._scheduler = self._fresh_scheduler(first, last_admitted)
        self._scheduler.resume(self._read_line(), self._remainder.end, self._remainder.skipped)

        async def collect() -> None:
            self._collecting = asyncio.create_task(self._collect())

        self._loop.run(collect())

    def _read_line(self) -> list[OpenGroup]:
        """Return the groups that the run had issued and no step admitted, and keep the scores of their rollouts."""
        line: list[OpenGroup] = []
        for task, rollouts in read_open_rollouts(self._store, self._requested).items():
            ended = {sample: played for sample, played in rollouts.items() if played is not None}
            issued = self._store.task(task).task
            metrics = {sample: self._keep(issued, sample, played) for sample, played in ended.items()}
            held = [sample for sample in rollouts if sample not in ended]
            versions = [played.oldest for played in ended.values()]
            versions += [unread_version(self._store, self._id(task, sample)) for sample in held]
            oldest = min((version for version in versions if version is not None), default=None)
            line.append(OpenGroup(task, metrics, held, oldest))
        # Failures from before the code changed do not count: the step may ask for as many tasks again.
        dropped = [] if self._code_changed else self._remainder.dropped_ahead
        counted = [OpenGroup(task.id, dropped=True) for task in dropped if task.cause != OUTDATED]
        return [*line, *counted]

    def close(self) -> None:
        """Stop the rollouts that are being made. They are cut off, and not failed: a resumed run issues them again."""

        async def stop(collecting: asyncio.Task[None]) -> None:
            collecting.cancel()
            await asyncio.wait({collecting})

        if self._collecting is not None and not self._collecting.done():
            self._loop.run(stop(self._collecting))

    # -- collecting ---------------------------------------------------------------------------------------------------

    async def _open_step(self, step: int) -> StepGroups:
        """Ask the scheduler for the groups of a step, and wait for its admission."""
        if not self._staleness:
            self._statistics.began = time.perf_counter()  # nothing was made before
        collecting = self._collecting
        assert collecting is not None, "a collector resumes before a step opens"
        self._restore_open_tasks()
        admission: asyncio.Future[StepGroups] = asyncio.get_running_loop().create_future()
        self._admission = admission
        self._posts.put_nowait(VersionPublished(step - 1, step - 1))
        self._posts.put_nowait(StepOpened(step))
        waited: list[asyncio.Future[Any]] = [admission, collecting]
        while not (await asyncio.wait(waited, timeout=REPORT_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            rollouts = [self._id(*each) for each in self._scheduler.waiting_for()]
            named = ", ".join(map(str, rollouts[:5])) + (", …" if len(rollouts) > 5 else "")
            get_logger("recipes").info("Step %d waits for %d rollouts: %s.", step, len(rollouts), named)
        if collecting.done():
            await collecting  # raises what ended it
        self._admission = None  # frees the groups with the step
        return admission.result()

    async def _collect(self) -> None:
        """Carry out the scheduler's decisions, until this is cancelled or fails. Each decision is written first."""
        running: dict[asyncio.Task[PlayedRollout], RolloutRequest] = {}
        try:
            while True:
                posts = [await self._posts.get()]
                while not self._posts.empty():
                    posts.append(self._posts.get_nowait())
                ended = [(running.pop(post), post.result()) for post in posts if isinstance(post, asyncio.Task)]
                happened: list[SchedulerEvent] = [post for post in posts if not isinstance(post, asyncio.Task)]
                happened += self._end_rollouts(ended)
                del posts, ended  # frees their tokens, which are stored by now
                decisions = [each for event in happened for each in self._scheduler.handle(event)]
                outdated = [each.task for each in decisions if isinstance(each, DropTask) and each.cause == OUTDATED]
                if outdated:
                    await self._requested.cancel([id for task in outdated for id in self._ids(task)], OUTDATED)
                admit = self._settle(decisions)
                async with self._issuing:
                    wanted = [
                        RolloutRequest(
                            self._tasks.task(each.task),
                            each.sample,
                            self._id(each.task, each.sample),
                            greedy=each.sample == self._config.group_size,
                            floor=each.floor,
                        )
                        for each in decisions
                        if isinstance(each, IssueRollout)
                    ]
                    if wanted:
                        await self._requested.start(wanted)
                    wanted = [self._without_bytes(each) for each in wanted]
                for rollout in wanted:
                    playing = asyncio.create_task(self._requested.result(rollout))
                    playing.add_done_callback(self._posts.put_nowait)
                    running[playing] = rollout
                if admit is not None:
                    assert self._admission is not None, "a step is admitted when it is requested"
                    self._admission.set_result(self._admitted_groups(admit))
                waits = self._admission is not None and not self._admission.done() and self._posts.empty()
                assert running or not waits, "the scheduler waits for nothing"
        except Exception as error:
            self._failure = error  # before anything that waits for `_issuing` goes on
            raise
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._requested.close()

    def _without_bytes(self, request: RolloutRequest) -> RolloutRequest:
        """Return a request without the bytes of its task's images, which are stored by now."""
        return replace(request, task=self._tasks.task(request.task.ordinal)) if request.task.images else request

    def _raise_failure(self) -> None:
        """Raise the error that ended the collecting task, if it has failed."""
        if self._failure is not None:
            raise self._failure

    def _end_rollouts(self, ended: Sequence[tuple[RolloutRequest, PlayedRollout]]) -> list[SchedulerEvent]:
        """Count rollouts that ended, keep their scores, and return the scheduler's events."""
        happened: list[SchedulerEvent] = []
        for wanted, played in sorted(ended, key=lambda each: (each[0].task.ordinal, each[0].sample)):
            task = wanted.task.ordinal
            for attempt in (*played.lost, played):
                self._statistics.add_attempt(attempt)
            if not played.succeeded:
                happened.append(RolloutFailed(task, wanted.sample))
                continue
            self._on_answer()
            happened.append(RolloutFinished(task, wanted.sample, self._keep(wanted.task, wanted.sample, played)))
        return happened

    def _keep(self, task: Task, sample: int, played: PlayedRollout) -> float:
        """Keep the score of a rollout, and return the number that its group is compared by."""
        is_baseline = sample == self._config.group_size
        put = tuple if is_baseline else self._put_samples
        scored = self._builder.score(self._id(task.ordinal, sample), task, played, put)
        if is_baseline:
            self._baselines[task.ordinal] = scored.total
        else:
            self._scored[scored.rollout.id] = scored
        return scored.metric

    def _settle(self, decisions: Sequence[Decision]) -> AdmitStep | None:
        """Write which tasks are dropped and which rollouts are admitted, and record their rewards in the order.

        Nothing is awaited between the two, so that `mark` finds both or neither. Return the admission, if there is one.
        """
        dropped = [each for each in decisions if isinstance(each, DropTask)]
        admit = next((each for each in decisions if isinstance(each, AdmitStep)), None)
        written: list[events.Event] = [events.TaskDropped(each.task, self._next_step, each.cause) for each in dropped]
        if admit is not None and (ids := self._admitted_ids(admit)):
            written.append(events.RolloutsAdmitted(admit.step, tuple(ids), admit.end, admit.step - 1, admit.skipped))
        if written:
            self._store.append(written)
        self._statistics.dropped.update(each.cause for each in dropped)
        if admit is not None and not ids:
            raise self._statistics.nothing_to_train_on(admit.step, self._config.tasks)
        for task in (each.task for each in dropped):
            earned = [self._scored[id].total for id in self._ids(task) if id in self._scored]
            self._tasks.settle(task, earned)
            self._forget(task)
        for task, samples in admit.tasks.items() if admit is not None else ():
            earned = [self._scored[self._id(task, sample)].total for sample in samples]
            self._tasks.settle(task, earned)
        return admit

    def _admitted_ids(self, admit: AdmitStep) -> list[int]:
        """Return the rollouts of an admission."""
        return [self._id(task, sample) for task, samples in admit.tasks.items() for sample in samples]

    # -- the records of a step ----------------------------------------------------------------------------------------

    def _admitted_groups(self, admit: AdmitStep) -> StepGroups:
        """Return what a step trains on, with the metrics of its collection."""
        scored = [self._scored[id] for id in self._admitted_ids(admit)]
        zero_variance = admit.zero_variance == len(admit.tasks)
        totals = [rollout.total for rollout in scored]
        self._builder.warnings.warn_about_step(admit.step, self._statistics, totals, zero_variance=zero_variance)
        metrics = self._statistics.metrics(episodic=self._builder.episodic, tempered=self._builder.tempered)
        metrics.merge(self._judge.pop_metrics())
        metrics.merge(self._requested.pop_metrics())
        groups = self._builder.groups(admit.step, scored, self._baselines, metrics)
        if self._config.candidates is not None:
            metrics.add("skipped_tasks", Last.of(len(admit.skipped)))
        for task in admit.tasks:
            self._forget(task)
        self._next_step = admit.step + 1
        self._statistics = CollectionStatistics()
        return groups

    # -- replay -------------------------------------------------------------------------------------------------------

    async def _replay_step(self, step: int) -> StepGroups:
        """Return a step that was admitted before, with the same rollouts, and record its rewards in the order as it did
        then."""
        ids = self._remainder.admitted.pop(step)
        states = [self._store.rollout(id) for id in ids]
        admitted = [self._store.task(task) for task in dict.fromkeys(state.task for state in states)]
        self._restore_tasks(self._remainder.dropped.pop(step, []), admitted)
        tasks = {issued.id: issued.task for issued in admitted}
        groups = self._builder.recorded(step, states, tasks, self._recall, self._put_samples)
        for task in admitted:
            earned = [each.total for each in groups.scored if each.rollout.task == task.id]
            self._tasks.settle(task.id, earned)
            self._forget(task.id)
        return groups

    def _recall(self, id: int) -> PlayedRollout:
        """Return how a rollout ended that a step was admitted with."""
        played = self._requested.recall(self._store.rollout(id))
        assert played is not None, f"rollout {id} is in a step, and has no score"
        return played

    def _restore_open_tasks(self) -> None:
        """Restore what the step had that was open when the run stopped, once all steps before it are replayed."""
        dropped, open_tasks = self._remainder.dropped_by_open_step, self._remainder.open_tasks
        for task in (*dropped, *open_tasks):
            self._statistics.add_interrupted(task, map(self._store.rollout, task.rollouts))
        self._restore_tasks(dropped, open_tasks)
        self._remainder = JournalRemainder()

    def _restore_tasks(self, dropped: Sequence[TaskState], others: Sequence[TaskState]) -> None:
        """Move the order of tasks past those that were issued before the restart, and record the rewards of the dropped
        ones."""
        self._tasks.replay([*dropped, *others])
        for task in dropped:
            states = map(self._store.rollout, task.rollouts)
            ended = [self._requested.recall(state) for state in states if state.sample < self._config.group_size]
            earned = [played.total for played in ended if played is not None and played.succeeded]
            self._tasks.settle(task.id, earned)

    # -- small parts --------------------------------------------------------------------------------------------------

    def _fresh_scheduler(self, first: int, step: int) -> CollectionScheduler:
        config = self._config
        return CollectionScheduler(
            tasks=config.tasks,
            group_size=config.group_size,
            refill=config.refill,
            first=first,
            step=step,
            greedy=self._builder.greedy,
            min_group_size=self._min_group,
            max_staleness=self._staleness,
            window=config.candidates,
            last_step=self._last_step,
        )

    @property
    def _rollouts_per_task(self) -> int:
        """The number of rollouts of a task, the greedy one included."""
        return self._config.group_size + self._builder.greedy

    def _id(self, task: int, sample: int) -> int:
        """Return the id of a rollout."""
        return self._builder.rollout_id(task, sample)

    def _ids(self, task: int) -> list[int]:
        """Return the ids of a task's rollouts, the greedy one included."""
        return [self._id(task, sample) for sample in range(self._rollouts_per_task)]

    def _forget(self, task: int) -> None:
        """Drop the data of a closed task."""
        for id in self._ids(task):
            self._scored.pop(id, None)
        self._baselines.pop(task, None)
