"""How the groups of a step come together, wherever its rollouts are made (`sources`).

    scheduler ─Issue─► an attempt, judged ─► journal ─► scheduler ─Admit─► samples and rollouts

Every rollout is written to the journal before it counts, and so is the admission that ends a step. A run that was
killed therefore takes up exactly what it had: admitted steps are replayed from the journal, scored rollouts are used,
and those that were under way are issued again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from etude.data import Dataset, Order
from etude.data.adapt import samples as rows_of_turns
from etude.errors import CollectionError
from etude.observe import Bar, Mean, Metrics, unwatched
from etude.recipes.agents import SCORED
from etude.recipes.collection import Collection
from etude.recipes.play import Played
from etude.recipes.rows import Keep, Rows, Scored
from etude.recipes.scheduler import Admit, Decision, Drop, Failed, Finished, Issue, Opened, Scheduler
from etude.recipes.tally import Notices, Tally
from etude.records import Outcome, Rollout, Sample, Task, Turn
from etude.rewards import Judge
from etude.store import Journal, Mark, Phase, RolloutState, TaskState, events

__all__ = ["Collector", "Ended", "Groups", "Source", "Watch", "row_of"]

Watch = Callable[[str, float], AbstractContextManager[Bar]]


@dataclass(frozen=True, eq=False)
class Groups:
    """What a step trains on: whole groups, scored."""

    rows: Sequence[Rows]
    """Of each rollout, what it is trained on as."""
    rollouts: Sequence[Rollout]
    metrics: Metrics
    replayed: bool = False
    """Whether they were read from the journal instead of sampled."""


class Source(Protocol):
    """Where groups of scored rollouts come from: an engine and a dataset, or agents."""

    def next(self, step: int) -> Groups:
        """The groups that this step trains on, within the staleness bound. The wait is bounded."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """How one attempt ended."""

    task: int
    sample: int
    played: Played


class Collector(ABC):
    """Collects the groups of a step; who is derived from it says how an attempt is made and what is written of it.

    Consumes tasks in the run's order. Waits for attempts, which bound themselves. Unblocked by whatever ends first;
    what ended together is told to the scheduler in the order of ordinals.
    """

    def __init__(
        self,
        collection: Collection,
        *,
        seed: int,
        dataset: Dataset,
        order: Order,
        judge: Judge,
        store: Journal,
        runner: asyncio.Runner,
        retries: int,
        episodic: bool,
        greedy: bool = False,
        min_group: int = 1,
        code_changed: bool = False,
        keep: Keep = tuple,
    ) -> None:
        """runner: the run's one event loop. retries: further attempts that the scheduler asks for. episodic: whether
        attempts may have several turns. greedy: whether each task is answered greedily too, for the others to be
        compared with. min_group: a group with fewer scored rollouts has failed. code_changed: the code that
        plays or judges is not what it was when the run was started. keep: where the tokens of rollouts are laid that a
        step may train on; here, by default."""
        self._config, self._seed, self._greedy, self._retries = collection, seed, greedy, retries
        self._dataset, self._order, self._store, self._judge = dataset, order, store, judge
        self._episodic, self._min_group, self._code_changed, self._lay = episodic, min_group, code_changed, keep
        self._tasks: dict[int, Task] = {}
        self._scored: dict[int, Scored] = {}
        self._to_lay: list[int] = []
        """Of those, the ones whose tokens are still here."""
        self._baselines: dict[int, float] = {}
        """What the greedy answer to each open task earned."""
        self._replay: dict[int, tuple[int, ...]] = {}
        self._dropped: dict[int, list[TaskState]] = {}
        self._lost: list[TaskState] = []
        """Tasks that were left out by the step that was open when the run stopped."""
        self._left: list[TaskState] = []
        self._again: list[Issue] = []
        self._tally = Tally()
        self._runner = runner
        self._notices = Notices(one_by_one=judge.one_by_one, pays=judge.pays)
        self.watch: Watch = unwatched
        """Shows how far a step's answers have come."""
        self._scheduler = self._fresh_scheduler(0)

    # -- what a source says -------------------------------------------------------------------------------------------

    @abstractmethod
    def _begun(self, issue: Issue) -> list[events.Event]:
        """What is written before an attempt is made."""

    @abstractmethod
    async def _issue(self, issues: Sequence[Issue]) -> None:
        """Do what is to be done for several attempts at once, before each is waited for."""

    @abstractmethod
    async def _attempt(self, task: int, sample: int) -> Ended:
        """One attempt at a rollout, to its end."""

    @abstractmethod
    def _over(self, end: Ended, retry: bool) -> list[events.Event]:
        """What is written of an attempt that ended."""

    @abstractmethod
    def _lapsed(self, left: RolloutState) -> int | None:
        """Make ready to try a rollout again that a run left without a score; how many attempts at it have failed. None
        is not to be tried."""

    def _metrics(self) -> Metrics:
        """What else there is to tell of a step's rollouts."""
        return Metrics()

    # -- what the loop asks -------------------------------------------------------------------------------------------

    def next(self, step: int) -> Groups:
        """The groups of this step: from the journal if it was admitted before, else sampled and judged now."""
        if step in self._replay:
            return self._replayed(step, self._replay.pop(step))
        self._tally = Tally()
        for task in (*self._lost, *self._left):
            self._tally.add_interrupted(task, map(self._store.rollout, task.rollouts))
        self._ask_again(self._lost, self._left)
        self._lost, self._left = [], []
        wanted = self._config.tasks * self._stride
        with self.watch(f"step {step}: answers", wanted) as bar:
            admit = self._runner.run(self._collect(step, bar.advance))
        ids = [self._id(task, sample) for task, samples in admit.tasks.items() for sample in samples]
        if not ids:
            error = self._tally.error
            between = "\n" if "\n" in error else " "  # a traceback ends its line
            raise CollectionError(
                f"Step {step} has nothing to train on: each of {self._tally.dropped.total()} tasks failed. "
                f"The last failure: {error}{between}Mend that; a run that is started again goes on from here."
            )
        self._store.append([events.Admitted(step, tuple(ids))])
        scored, level, groups = [self._scored.pop(rollout) for rollout in ids], admit.spare, len(admit.tasks)
        self._notices.of(step, self._tally, [each.total for each in scored], level=level == groups)
        metrics = self._tally.metrics(level, groups, episodic=self._episodic)
        metrics.merge(self._judge.spent())
        metrics.merge(self._metrics())
        return self._groups(scored, metrics)

    def replace_none(self) -> None:
        """Have each step ask its first `collect.tasks` tasks alone, and no other in place of one that failed."""
        self._scheduler.bound = self._config.tasks

    @property
    def replays(self) -> int:
        """The last step that was admitted before and is read back from the journal; 0 if none is."""
        return max(self._replay, default=0)

    def mark(self) -> tuple[dict[str, Any], Mark]:
        """Return the position of the order of tasks and of the journal, at one moment, for a checkpoint."""
        return self._order.state(), self._store.flush()

    def take_up(self, step: int, state: Mapping[str, Any] | None, mark: Mark) -> None:
        """Resume at the checkpoint of this step, state and mark (0 and None: at the beginning).

        Later steps of the journal are replayed, scored rollouts are used, unfinished ones are issued again. A
        checkpoint that was saved during a replay has later steps before its mark.
        """
        since, dropped = 0, []
        for at, event in self._store.read(kinds=(events.Admitted, events.TaskDropped)):
            match event:
                case events.Admitted(step=trained, rollouts=rollouts) if trained > step:
                    self._replay[trained] = rollouts
                case events.Admitted(step=trained) if trained == step:
                    since = at
                case events.TaskDropped(task=task, step=left_by) if left_by > step and task < SCORED:
                    dropped.append((left_by, task))
        self._store.check(mark, since)
        for left_by, task in dropped:
            self._dropped.setdefault(left_by, []).append(self._store.task(task))
        if state is not None:
            self._order.restore(state)
        first = self._order.position
        for issued in self._store.listed(TaskState, first - 1):
            if issued.id >= SCORED:
                break
            first = issued.id + 1
        self._left = [task for task in self._store.tasks(Phase.OPEN) if task.id < SCORED]
        self._scheduler = self._fresh_scheduler(first)
        scored, again = self._open_work()
        self._lost = [task for left_by, left in self._dropped.items() if left_by not in self._replay for task in left]
        # What the code failed at before it was changed does not count: the step may ask for as many tasks again.
        self._again = self._scheduler.resume(scored, again, 0 if self._code_changed else len(self._lost))

    def _open_work(self) -> tuple[dict[int, dict[int, float]], dict[tuple[int, int], int]]:
        """Of the tasks that are open: what was scored, and what was not, with how often that has failed."""
        scored: dict[int, dict[int, float]] = {}
        again: dict[tuple[int, int], int] = {}
        for left in self._store.rollouts(Phase.QUEUED, Phase.RUNNING, Phase.FINISHED):
            if left.task >= SCORED:
                continue
            if left.phase is Phase.FINISHED and self._counts(left):
                found = self._from_journal(left)
                scored.setdefault(left.task, {})[left.sample] = found.metric
                if left.sample < self._config.group_size:
                    self._scored[left.id] = found.laid(self._lay)
                else:
                    self._baselines[left.task] = found.total
            elif (failed := self._lapsed(left)) is not None:
                again[left.task, left.sample] = failed
        return scored, again

    def _counts(self, ended: RolloutState) -> bool:
        """Whether a rollout that ended has its score in the journal."""
        return ended.last is not None and ended.last.total is not None

    # -- collecting ---------------------------------------------------------------------------------------------------

    async def _collect(self, step: int, told: Callable[[], None]) -> Admit:
        """Do what the scheduler decides until it admits. What is decided is written before it is done. `told` is called
        after each answer."""
        decisions: list[Decision] = [*self._again, *self._scheduler.on(Opened(step))]
        self._again = []
        written: list[events.Event] = []
        running: set[asyncio.Task[Ended]] = set()
        ended: asyncio.Queue[asyncio.Task[Ended]] = asyncio.Queue()
        try:
            while True:
                written += self._decided(step, decisions)
                if written:
                    self._store.append(written)
                written = []
                self._lay_down()
                issues = [decision for decision in decisions if isinstance(decision, Issue)]
                if issues:
                    await self._issue(issues)
                for issue in issues:
                    attempt = asyncio.create_task(self._attempt(issue.task, issue.sample))
                    attempt.add_done_callback(ended.put_nowait)
                    running.add(attempt)
                for decision in decisions:
                    if isinstance(decision, Admit):
                        return decision
                assert running, "the scheduler waits for nothing"
                done = [await ended.get()]
                while not ended.empty():
                    done.append(ended.get_nowait())
                running.difference_update(done)
                results = await asyncio.gather(*done)
                for end in results:
                    if end.played.verdict.outcome is Outcome.SUCCEEDED:
                        told()
                decisions, written = self._settled(sorted(results, key=lambda end: (end.task, end.sample)))
                del done, results  # whose tokens are written and laid down next
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _settled(self, ended: Sequence[Ended]) -> tuple[list[Decision], list[events.Event]]:
        """What follows from attempts that ended, and what is to be written of them."""
        decisions: list[Decision] = []
        written: list[events.Event] = []
        for end in ended:
            played, verdict = end.played, end.played.verdict
            self._tally.of(played)
            if verdict.error:
                self._tally.failure(verdict.outcome, verdict.error)
            if verdict.outcome is Outcome.SUCCEEDED:
                self._count(end)
                metric = self._config.compared(end.task, verdict.parts, played.total, verdict.error)
                follows = self._scheduler.on(Finished(end.task, end.sample, metric))
            else:
                follows = self._scheduler.on(Failed(end.task, end.sample, verdict.error))
            written += self._over(end, Issue(end.task, end.sample) in follows)
            decisions += follows
        return decisions, written

    def _count(self, end: Ended) -> None:
        """Remember what a rollout earned: to be trained on, or to be compared with."""
        played, id = end.played, self._id(end.task, end.sample)
        if end.sample == self._config.group_size:
            self._baselines[end.task] = played.total
            return
        self._scored[id] = self._scored_by(played, id, end.task)
        self._to_lay.append(id)

    def _lay_down(self) -> None:
        """Lay down the tokens of the rollouts that were written since this was done last, and let go of them here."""
        for id in self._to_lay:
            if id in self._scored:  # else its task was dropped
                self._scored[id] = self._scored[id].laid(self._lay)
        self._to_lay.clear()

    def _decided(self, step: int, decisions: Sequence[Decision]) -> list[events.Event]:
        """What is to be written of decisions: tasks first asked for, attempts begun, tasks left out."""
        written: list[events.Event] = []
        for decision in decisions:
            match decision:
                case Issue():
                    written += self._begun(decision)
                case Drop(task, cause):
                    self._tally.dropped[cause] += 1
                    written.append(events.TaskDropped(task, step, cause))
                    earned = [self._scored[id].total for id in self._ids(task) if id in self._scored]
                    self._order.saw(row_of(self._tasks.pop(task)), earned)
                    self._forget(task)
                case Admit(_, tasks):
                    for task in tasks:
                        self._forget(task, but=tasks[task])
        return written

    # -- small parts --------------------------------------------------------------------------------------------------

    def _fresh_scheduler(self, first: int) -> Scheduler:
        config = self._config
        return Scheduler(
            tasks=config.tasks,
            group_size=config.group_size,
            refill=config.refill,
            retries=self._retries,
            first=first,
            greedy=self._greedy,
            min_group=self._min_group,
        )

    @property
    def _stride(self) -> int:
        """How many rollouts a task has, the greedy one included."""
        return self._config.group_size + self._greedy

    def _id(self, task: int, sample: int) -> int:
        """The run-wide name of a rollout."""
        return task * self._stride + sample

    def _ids(self, task: int) -> list[int]:
        """The names of a task's rollouts, the greedy one included."""
        return [self._id(task, sample) for sample in range(self._stride)]

    def _forget(self, task: int, but: Sequence[int] = ()) -> None:
        """Let go of what was kept of a task that is settled; of these samples the scores are still wanted."""
        for sample, id in enumerate(self._ids(task)):
            if sample not in but:
                self._scored.pop(id, None)
        if not but:
            self._baselines.pop(task, None)

    def _ask_again(self, dropped: Sequence[TaskState], others: Sequence[TaskState]) -> None:
        """Move the order of tasks past those that were issued before the restart, and tell it what the dropped ones of
        them earned."""
        for task in sorted((*dropped, *others), key=lambda task: task.id):
            if task.id >= self._order.position:
                self._order.again(task.id, task.row)
            self._tasks[task.id] = task.task
        size = self._config.group_size
        for task in dropped:
            tries = [state for state in map(self._store.rollout, task.rollouts) if state.sample < size]
            earned = [self._from_journal(state).total for state in tries if self._counts(state)]
            self._order.saw(row_of(self._tasks.pop(task.id)), earned)

    def _task(self, ordinal: int) -> Task:
        """The task of an ordinal: one that was asked before, or the next in the run's order."""
        if ordinal not in self._tasks:
            self._tasks[ordinal] = self._dataset.task(self._order.row(ordinal), ordinal)
        return self._tasks[ordinal]

    def _scored_by(self, played: Played, id: int, task: int) -> Scored:
        """A rollout that a step may train on, by how it was played."""
        verdict = played.verdict
        told = verdict.reward, verdict.parts, Outcome.SUCCEEDED, played.truncated, played.role
        return self._of_turns(played.turns, Rollout(id, task, task, *told), played.total, verdict.error)

    def _of_turns(self, turns: Sequence[Turn], rollout: Rollout, total: float, error: str) -> Scored:
        metric = self._config.compared(rollout.task, rollout.parts, total, error)
        return Scored(len(turns), Rows.of(self._samples(turns, rollout.id)), rollout, total, metric)

    def _samples(self, turns: Sequence[Turn], rollout: int) -> list[Sample]:
        """The token sequences that a rollout is trained on as."""
        return rows_of_turns(turns, rollout)

    def _from_journal(self, state: RolloutState) -> Scored:
        """A scored rollout as the journal has it."""
        last = state.last
        assert last is not None and last.reward is not None and last.total is not None
        told = last.reward, last.parts, Outcome.SUCCEEDED, last.truncated, last.role
        rollout = Rollout(state.id, state.task, state.task, *told)
        return self._of_turns(self._store.turns(state.id), rollout, last.total, last.error)

    def _replayed(self, step: int, ids: Sequence[int]) -> Groups:
        """A step that was admitted before, with the same rollouts; the order hears of it as it did then."""
        states = [self._store.rollout(id) for id in ids]
        admitted = [self._store.task(task) for task in {state.task for state in states}]
        self._ask_again(self._dropped.pop(step, []), admitted)
        for task in {state.task for state in states} if self._greedy else ():
            last = self._store.rollout(self._id(task, self._config.group_size)).last
            assert last is not None and last.total is not None, "a task without its greedy answer is dropped"
            self._baselines[task] = last.total
        scored = [self._from_journal(state).laid(self._lay) for state in states]
        return self._groups(scored, Metrics(), replayed=True)

    def _groups(self, scored: Sequence[Scored], metrics: Metrics, *, replayed: bool = False) -> Groups:
        """The records of an admission. The order is told what its rows earned."""
        earned: dict[int, list[float]] = {}
        rollouts = self._notices.alike([each.rollout for each in scored])
        for each in scored:
            earned.setdefault(each.rollout.task, []).append(each.total)
        if self._episodic:
            metrics.add("turns", Mean.over(sum(each.turns for each in scored), len(scored)))
        if self._greedy:
            baselines = {task: self._baselines.pop(task) for task in earned}
            rollouts = [replace(each, greedy_reward=baselines[each.task]) for each in rollouts]
            metrics.add("greedy_reward", Mean.over(sum(baselines.values()), len(baselines)))
        for task, rewards in earned.items():
            self._order.saw(row_of(self._tasks.pop(task)), rewards)
        return Groups([each.rows for each in scored], rollouts, metrics, replayed)


def row_of(task: Task) -> int:
    """The row of the dataset that a task is."""
    row = task.fields["row"]
    assert isinstance(row, int)
    return row
