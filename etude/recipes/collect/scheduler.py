"""Decides which rollouts to issue, drop and admit: a pure function of the events so far.

    events in                                                            decisions out
    StepOpened, VersionPublished, RolloutFinished, RolloutFailed  ──►    IssueRollout, DropTask, AdmitStep

It has no clock, no randomness and no input or output. So the same object runs in the training loop, in a simulation,
and over a journal after a crash. Slow rollouts are never dropped, because training would then prefer short answers. The
scheduler holds back *issuing* instead.

Version v is the weights after v steps. Step k trains with version k − 1 and makes version k. The staleness of a rollout
at step k is k − 1 less the version of its oldest token. It is at most `max_staleness`, by this rule:

    latest step of a group = steps admitted + 1 + windows closed before it (`step_windows`)
    the next one is issued if its latest step ≤ floor + 1 + max_staleness   (floor: no rollout issued now is older)
                          and its latest step ≤ the run's last step         (max_staleness=0: the open step)

A window counts every undecided group as one to train on. What fails later closes windows later, so it only lowers the
latest step of the groups behind it. So no group is trained after the step that allowed it to be issued.

The groups of a step are the first `tasks` groups that can be trained on, in the order of their ordinals. A task is
issued only to replace one that cannot. So the choice of tasks does not depend on the order in which rollouts finish.
With a `window` it does: quick groups are trained before slow ones, within the same bound (`step_windows`).

Where rollouts are compared with a greedy answer to their task, that answer is one more rollout. Its sample number
follows those of the group. It is in no group and is never admitted. A task whose greedy answer failed is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

from etude.recipes.collect.step_windows import GroupStatus, StepWindows, TaskGroup, choose_early

OUTDATED = "its rollouts are older than the staleness bound"
"""The cause with which a group is dropped after the bound was lowered. Some of its rollouts may not have ended."""


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepOpened:
    """A step requests its groups. The weights of the step before it are published."""

    step: int


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """New weights were published."""

    version: int
    floor: int
    """No token of a rollout that is issued from now on has a lower version. It never falls."""


@dataclass(frozen=True, slots=True)
class RolloutFinished:
    """A rollout ended with a score."""

    task: int
    sample: int
    metric: float
    """The number that groups are compared by: the whole reward or one part of it, before any penalty."""


@dataclass(frozen=True, slots=True)
class RolloutFailed:
    """A rollout ended without a score, its last retry too."""

    task: int
    sample: int


SchedulerEvent = StepOpened | VersionPublished | RolloutFinished | RolloutFailed


# -- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IssueRollout:
    """Have this rollout made."""

    task: int
    sample: int
    floor: int
    """No token of the rollout can be older than this version."""


@dataclass(frozen=True, slots=True)
class DropTask:
    """Leave this task out of training."""

    task: int
    cause: str


@dataclass(frozen=True, slots=True)
class AdmitStep:
    """Train the step on these tasks: for each, the samples that were scored."""

    step: int
    tasks: Mapping[int, tuple[int, ...]]
    zero_variance: int
    """Number of groups in which all rewards are equal, so that they have no advantage."""
    end: int
    """The first ordinal that no step has looked at."""
    skipped: tuple[int, ...] = ()
    """The ordinals before `end` that later steps look at: groups that this step left behind."""


Decision = IssueRollout | DropTask | AdmitStep


# -- the groups of a run that was stopped -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that a stopped run had issued and not admitted."""

    task: int
    metrics: Mapping[int, float] = field(default_factory=dict)
    """The metric of each rollout that was scored, by sample."""
    held: Sequence[int] = ()
    """The rollouts to make again. Any other one without a metric has failed."""
    oldest: int | None = None
    """The oldest policy version among the tokens of its rollouts that ended; None if it has none."""
    dropped: bool = False
    """True if the run had dropped it: it counts in the length of its window, and is not trained on."""


# -- the scheduler ----------------------------------------------------------------------------------------------------


class CollectionScheduler:
    """Decides for one run. The caller passes events in the order they happen, and carries out the decisions in that
    order."""

    def __init__(
        self,
        *,
        tasks: int,
        group_size: int,
        refill: int,
        first: int = 0,
        greedy: bool = False,
        min_group_size: int = 1,
        max_staleness: int = 0,
        window: int | None = None,
        last_step: int | None = None,
        step: int = 0,
        floor: int = 0,
    ) -> None:
        """tasks: groups per step. refill: how many times `tasks` a step may look at further groups in place of those
        with equal rewards; 0 keeps them. Groups that failed are replaced within the same bound, or within `tasks` where
        it is 0. first: the ordinal to issue next. greedy: each task gets one greedy answer too. min_group_size: a group
        with fewer scored rollouts has failed. max_staleness: the versions by which a rollout may be older than the
        weights it trains; with 0, nothing is issued before a step opens. window: the most groups that are undecided or
        wait to be trained on; a step trains on those that are decided first. With None, steps train in the order of
        ordinals. last_step: the run's last step, for which the last group is issued; None knows no last one. step: the
        last step that was admitted. floor: the version that was published last."""
        self._tasks = tasks
        self._size = group_size
        self._refill = refill
        self._windows = StepWindows(tasks, tasks * (1 + max(refill, 1)))
        self._next = first
        self._greedy = greedy
        self._min_group = min_group_size
        self._staleness = max_staleness
        self._window = window
        self._last = last_step
        self._line: dict[int, TaskGroup] = {}
        """The groups of the windows, by their ordinals and in that order."""
        self._held: deque[TaskGroup] = deque()
        self._failed_before: list[DropTask] = []
        """Groups of a stopped run that failed, and whose drop is not decided yet."""
        self._step = self._opened = step
        self._floor = floor
        self._end = 0
        """The first ordinal that no admitted step has looked at."""
        self._decided = 0
        """The number of groups that were found usable."""
        self._awaited: TaskGroup | None = None
        """The oldest undecided group, if the open step may not leave it behind."""

    @property
    def max_tasks(self) -> int:
        """The most tasks that a step may look at in all."""
        return self._windows.longest

    @max_tasks.setter
    def max_tasks(self, number: int) -> None:
        """Set the bound, before any group is issued."""
        assert not self._line, "the bound holds for whole windows"
        self._windows.longest = number

    @property
    def next_task(self) -> int:
        """The ordinal that will be issued next."""
        return self._next

    @property
    def running(self) -> int:
        """The number of rollouts that are running."""
        return sum(len(group.running) for group in self._line.values())

    def waiting_for(self) -> list[tuple[int, int]]:
        """Return the task and sample of each rollout that the open step waits for."""
        if self._opened == self._step:
            return []
        any_of_them = self._window is not None and self._windows.usable < self._tasks
        groups = self._line.values() if any_of_them else self._first_window()
        return [(group.task, sample) for group in groups for sample in sorted(group.running)]

    def resume(self, line: Sequence[OpenGroup], end: int = 0, skipped: Collection[int] = ()) -> None:
        """Restore the groups of a stopped run that no step had admitted. What is to be made again is issued as the rule
        allows it.

        end, skipped: those of the last admission. A group that was dropped before `end` and not skipped no longer
        counts. A step that dropped all that it may has failed, and starts anew. A group with a rollout that is too
        old, because the bound was lowered, is dropped, and is in no window.
        """
        assert not self._line, "only a new scheduler resumes a run"
        self._end = end
        line = sorted(line, key=lambda group: group.task)
        line = [group for group in line if not group.dropped or group.task >= end or group.task in skipped]
        while len(line) >= self.max_tasks and all(group.dropped for group in line[: self.max_tasks]):
            line = line[self.max_tasks :]
        for left in line:
            self._next = max(self._next, left.task + 1)
            if left.oldest is not None and self._latest_step_of_next() - 1 - left.oldest > self._staleness:
                self._failed_before.append(DropTask(left.task, OUTDATED))  # the bound was higher when it was made
                continue
            group = self._line[left.task] = TaskGroup(left.task, self._windows.append())
            group.metrics = dict(left.metrics)
            group.held = tuple(sorted(left.held))
            group.floor = left.oldest
            if left.dropped:
                self._rule_out(group)
            elif not group.held:
                self._failed_before += self._classify(group)
        self._held.extend(group for group in self._line.values() if group.held)

    def handle(self, event: SchedulerEvent) -> list[Decision]:
        """Return the decisions that follow from one event."""
        decisions: list[Decision] = [*self._failed_before]
        self._failed_before.clear()
        match event:
            case StepOpened(step):
                assert self._opened == self._step and step == self._step + 1, "steps open one at a time, in order"
                self._opened = step
            case VersionPublished(_, floor):
                assert floor >= self._floor, "a version that was published stays published"
                self._floor = floor
            case RolloutFinished() | RolloutFailed():
                group = self._line[event.task]
                group.running.remove(event.sample)
                if isinstance(event, RolloutFinished):
                    group.metrics[event.sample] = event.metric
                decisions += self._classify(group)
        decisions += self._issue()
        if self._opened > self._step:
            decisions += self._admit()
        return decisions

    # -- groups that ended --------------------------------------------------------------------------------------------

    def _classify(self, group: TaskGroup) -> list[DropTask]:
        """Decide whether a group can be trained on, once all its rollouts ended."""
        if group.running or group.held:
            return []
        cause = self._failure(group)
        if cause:
            self._rule_out(group)
            return [DropTask(group.task, cause)]
        group.status = GroupStatus.ZERO_VARIANCE if self._refill and group.has_zero_variance else GroupStatus.USABLE
        self._windows.decide(group.place, usable=group.status is GroupStatus.USABLE)
        self._decided += 1
        group.decided = self._decided
        if group is self._awaited or group.status is not GroupStatus.USABLE:
            self._awaited = None
        return []

    def _failure(self, group: TaskGroup) -> str:
        """Return the reason why a finished group cannot be trained on; empty if it can."""
        scored = len(group.sampled(self._size))
        if not scored:
            return "every rollout failed"
        if scored < self._min_group:
            return "too few rollouts are left"
        return "the greedy answer failed" if self._greedy and self._size not in group.metrics else ""

    def _rule_out(self, group: TaskGroup) -> None:
        """Leave a group in the line for its length alone."""
        if group.status is not GroupStatus.ZERO_VARIANCE:
            self._windows.decide(group.place, usable=False)
        group.status = GroupStatus.FAILED
        group.held = ()
        group.metrics.clear()
        self._awaited = None

    # -- issuing ------------------------------------------------------------------------------------------------------

    def _limit(self) -> int:
        """Return the last step that a group may be issued for."""
        limit = self._floor + 1 + self._staleness
        last = self._last if self._staleness else self._opened
        return limit if last is None else min(limit, last)

    def _latest_step(self, group: TaskGroup) -> int:
        """Return the last step that may train on a group."""
        return self._step + 1 + self._windows.before(group.place)

    def _latest_step_of_next(self) -> int:
        """Return the last step that may train on the group that is issued next."""
        return self._step + 1 + self._windows.closed

    @property
    def _has_full_window(self) -> bool:
        """True if no further group of any age may be issued: another one would only become older."""
        return self._window is not None and self._windows.candidates >= self._window

    def _deadline(self, group: TaskGroup) -> float:
        """Return the last step that may train on a group, by its age."""
        return inf if group.floor is None else group.floor + 1 + self._staleness

    def _is_too_old(self, group: TaskGroup) -> bool:
        return self._opened > self._deadline(group)

    def _issue(self) -> list[Decision]:
        """Issue what the rule allows: first what a stopped run had issued, then whole new groups."""
        issued: list[TaskGroup] = []
        limit = self._limit()
        while self._held and self._latest_step(self._held[0]) <= limit:
            issued.append(self._held.popleft())
        while self._latest_step_of_next() <= limit and not self._has_full_window:
            samples = tuple(range(self._size + self._greedy))
            group = self._line[self._next] = TaskGroup(self._next, self._windows.append(), held=samples)
            self._next += 1
            issued.append(group)
        decisions: list[Decision] = []
        for group in issued:
            decisions += [IssueRollout(group.task, sample, self._floor) for sample in group.held]
            group.floor = self._floor if group.floor is None else min(group.floor, self._floor)
            group.running = set(group.held)
            group.held = ()
        return decisions

    # -- admission ----------------------------------------------------------------------------------------------------

    def _first_window(self) -> Iterator[TaskGroup]:
        end = self._windows.first_end
        return takewhile(lambda group: group.place < end, self._line.values())

    def _choose_early(self) -> list[TaskGroup]:
        """Return the groups that the open step trains on before slower ones; none if it must wait."""
        if self._window is None or self._awaited is not None or self._windows.usable < self._tasks:
            return []
        chosen = choose_early(
            list(self._line.values()), self._deadline, self._tasks, self._windows.longest, self._opened
        )
        if not chosen:
            self._awaited = next((group for group in self._line.values() if group.status is GroupStatus.OPEN), None)
        return chosen

    def _admit(self) -> list[Decision]:
        """Admit the open step if its groups are there: by `collect.order`, or those of the first window."""
        chosen = self._choose_early()
        if chosen:
            end = max(self._end, *(group.task + 1 for group in chosen))
        elif self._windows.first_is_decided:
            window = list(self._first_window())
            chosen, end = [group for group in window if group.status is GroupStatus.USABLE], window[-1].task + 1
        else:
            return []
        passed = [each for each in self._line.values() if each.task < end and not each.status.is_candidate]
        others = [group for group in passed if group.status is GroupStatus.ZERO_VARIANCE]
        self._take([*chosen, *passed])
        missing = self._tasks - len(chosen)  # of a window whose length left too few
        chosen = sorted([*chosen, *others[:missing]], key=lambda group: group.task)
        assert not any(map(self._is_too_old, chosen)), "a step would train on rollouts that are too old"
        assert self._staleness or not self.running, "without staleness nothing runs while a step trains"
        self._step = self._opened
        self._end = max(self._end, end)
        self._awaited = None
        dropped: list[Decision] = [DropTask(group.task, "every rollout earned the same") for group in others[missing:]]
        tasks = {group.task: group.sampled(self._size) for group in chosen}
        zero_variance = sum(group.has_zero_variance for group in chosen)
        skipped = tuple(takewhile(lambda task: task < self._end, self._line))
        return [*dropped, AdmitStep(self._step, tasks, zero_variance, self._end, skipped)]

    def _take(self, groups: Sequence[TaskGroup]) -> None:
        """Take groups out of the line, from any place, and form the windows of the others anew."""
        for group in groups:
            del self._line[group.task]
        self._windows = StepWindows(self._tasks, self._windows.longest)
        for group in self._line.values():
            group.place = self._windows.append()
            if group.status is not GroupStatus.OPEN:
                self._windows.decide(group.place, usable=group.status is GroupStatus.USABLE)
