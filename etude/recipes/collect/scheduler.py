"""Decides which rollouts to issue, retry, drop and admit: a pure function of the events so far.

    events in                                       decisions out
    StepOpened, RolloutFinished, AttemptFailed ──►  IssueRollout, DropTask, AdmitStep

It has no clock, no randomness and no input or output. So the same object runs in the training loop, in a simulation,
and over a journal after a crash. Slow rollouts are never dropped, because training would then prefer short answers. The
scheduler holds back *issuing* instead.

The groups of a step are the first `tasks` groups that can be trained on, in the order of their ordinals. A task is
issued only to replace one that cannot. So the choice of tasks does not depend on the order in which rollouts finish.

Where rollouts are compared with a greedy answer to their task, that answer is one more rollout. Its sample number
follows those of the group. It is in no group and is never admitted. A task whose greedy answer failed is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from etude.records import has_zero_variance

__all__ = [
    "AdmitStep",
    "AttemptFailed",
    "CollectionScheduler",
    "Decision",
    "DropTask",
    "IssueRollout",
    "RolloutFinished",
    "SchedulerEvent",
    "StepOpened",
]


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepOpened:
    """A step requests its groups."""

    step: int


@dataclass(frozen=True, slots=True)
class RolloutFinished:
    """A rollout ended with a score."""

    task: int
    sample: int
    metric: float
    """The number that groups are compared by: the whole reward or one part of it, before any penalty."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt at a rollout ended without a score."""

    task: int
    sample: int
    cause: str


SchedulerEvent = StepOpened | RolloutFinished | AttemptFailed


# -- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IssueRollout:
    """Start an attempt at this rollout."""

    task: int
    sample: int


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
    """Number of groups in which all rewards are equal, so that comparing them teaches nothing."""


Decision = IssueRollout | DropTask | AdmitStep


# -- the scheduler ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TaskGroup:
    """The state of one task's rollouts."""

    running: set[int] = field(default_factory=set)
    metrics: dict[int, float] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)

    @property
    def has_zero_variance(self) -> bool:
        """True if all its metrics are equal, also to the greedy answer where there is one: DAPO's filter (2503.14476),
        if `refill` is set. A single rollout compares with nothing, and does not count as equal."""
        values = self.metrics.values()
        return len(values) > 1 and bool(has_zero_variance(min(values), max(values)))

    def sampled(self, size: int) -> tuple[int, ...]:
        """Return the samples of the group that were scored."""
        return tuple(sample for sample in sorted(self.metrics) if sample < size)


class CollectionScheduler:
    """Decides for one run. The caller passes events in the order they happen, and carries out the decisions in that
    order."""

    def __init__(
        self,
        *,
        tasks: int,
        group_size: int,
        refill: int,
        retries: int,
        first: int = 0,
        greedy: bool = False,
        min_group_size: int = 1,
    ) -> None:
        """tasks: groups per step. refill: how many times `tasks` a step may issue in place of groups with equal
        rewards; 0 keeps them. Groups that failed are replaced within the same bound, or within `tasks` where it is 0.
        retries: attempts after the first. first: the ordinal to issue next. greedy: each task gets one greedy answer
        too. min_group_size: a group with fewer scored rollouts has failed."""
        self._tasks, self._size, self._refill, self._retries = tasks, group_size, refill, retries
        self.max_tasks = tasks * (1 + max(refill, 1))
        """The most tasks that a step may issue in all."""
        self._next = first
        self._greedy, self._min_group = greedy, min_group_size
        self._groups: dict[int, _TaskGroup] = {}
        self._zero_variance: dict[int, _TaskGroup] = {}
        self._step = 0
        self._open = False
        self._issued = 0

    @property
    def next_task(self) -> int:
        """The ordinal that will be issued next."""
        return self._next

    @property
    def running(self) -> int:
        """The number of rollouts that are running."""
        return sum(len(group.running) for group in self._groups.values())

    def resume(
        self,
        scored: Mapping[int, Mapping[int, float]],
        unfinished: Mapping[tuple[int, int], int],
        dropped: int = 0,
    ) -> list[IssueRollout]:
        """Restore the open tasks of a killed run: those that were neither admitted nor dropped.

        scored: for each such task, the metric of each scored sample. unfinished: the other rollouts, with the number of
        their failed attempts; they are issued again. dropped: how many tasks the open step had already dropped; a step
        that dropped all it may has failed, and starts anew.
        """
        assert not self._groups, "only a new scheduler takes up an old run"
        self._issued = dropped % self.max_tasks
        for task, metrics in scored.items():
            self._groups[task] = _TaskGroup(metrics=dict(metrics))
        unfinished_ids = sorted(unfinished)
        for task, sample in unfinished_ids:
            group = self._groups.setdefault(task, _TaskGroup())
            group.running.add(sample)
            group.attempts[sample] = unfinished[task, sample]
        self._next = max([self._next, *(task + 1 for task in self._groups)])
        return [IssueRollout(task, sample) for task, sample in unfinished_ids]

    def handle(self, event: SchedulerEvent) -> list[Decision]:
        """Return the decisions that follow from one event."""
        match event:
            case StepOpened(step):
                assert not self._open and step > self._step, "steps open one at a time, in order"
                self._step, self._open = step, True
                self._issued += len(self._groups)
                return self._settle(sorted(self._groups))
            case RolloutFinished(task, sample, metric):
                group = self._groups[task]
                group.running.remove(sample)
                group.metrics[sample] = metric
                return self._settle([task])
            case AttemptFailed(task, sample, _):
                group = self._groups[task]
                group.attempts[sample] = group.attempts.get(sample, 0) + 1
                if group.attempts[sample] <= self._retries:
                    return [IssueRollout(task, sample)]
                group.running.remove(sample)
                return self._settle([task])

    def _settle(self, touched: Iterable[int]) -> list[Decision]:
        """Set aside groups that teach nothing, issue others in their place, and admit the step once there are
        enough."""
        if not self._open:
            return []
        decisions: list[Decision] = []
        for task in touched:
            group = self._groups[task]
            if group.running:
                continue
            cause = self._failure(group)
            if cause:
                del self._groups[task]
                decisions.append(DropTask(task, cause))
            elif self._refill and group.has_zero_variance:
                self._zero_variance[task] = self._groups.pop(task)
        while len(self._groups) < self._tasks and self._issued < self.max_tasks:
            decisions += self._issue()
        if not any(group.running for group in self._groups.values()):
            decisions += self._admit()
        return decisions

    def _failure(self, group: _TaskGroup) -> str:
        """Return the reason why a finished group cannot be trained on; empty if it can."""
        scored = len(group.sampled(self._size))
        if not scored:
            return "every rollout failed"
        if scored < self._min_group:
            return "too few rollouts are left"
        return "the greedy answer failed" if self._greedy and self._size not in group.metrics else ""

    def _issue(self) -> list[Decision]:
        task = self._next
        self._next, self._issued = task + 1, self._issued + 1
        samples = range(self._size + self._greedy)
        self._groups[task] = _TaskGroup(running=set(samples))
        return [IssueRollout(task, sample) for sample in samples]

    def _admit(self) -> list[Decision]:
        """Admit the first groups that can be trained on; if the bound left too few, groups with equal rewards fill
        up."""
        missing = max(self._tasks - len(self._groups), 0)
        for task in sorted(self._zero_variance)[:missing]:
            self._groups[task] = self._zero_variance.pop(task)
        dropped: list[Decision] = [
            DropTask(task, "every rollout earned the same") for task in sorted(self._zero_variance)
        ]
        chosen = sorted(self._groups)[: self._tasks]
        tasks = {task: self._groups[task].sampled(self._size) for task in chosen}
        zero_variance = sum(self._groups.pop(task).has_zero_variance for task in chosen)
        self._zero_variance.clear()
        self._open, self._issued = False, 0
        return [*dropped, AdmitStep(self._step, tasks, zero_variance)]
