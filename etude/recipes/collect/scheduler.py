"""Which rollouts to issue, retry, drop and admit: a pure function of what has happened.

    events in                                       decisions out
    Opened, Finished, Failed               ──►      Issue, Drop, Admit

It has no clock, no chance and no input or output of its own, so the same object runs under the training loop, under a
simulation, and over a journal after a crash. Nothing is dropped for being slow: the scheduler holds back *issuing*,
because dropping what is slow trains on short answers.

The groups of a step are the first `tasks` groups, in the order of their ordinals, that can be trained on. A task is
issued only in place of one that cannot, so which tasks those are does not depend on who finishes first.

Where rollouts are compared with a greedy answer to their task, that is one rollout more, of the sample number that
follows the group's. It is in no group and is never admitted, and a task whose greedy answer failed is dropped.
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


# -- what happens -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepOpened:
    """A step asks for its groups."""

    step: int


@dataclass(frozen=True, slots=True)
class RolloutFinished:
    """A rollout ended and was scored."""

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


# -- what is to be done -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IssueRollout:
    """Start an attempt at this rollout."""

    task: int
    sample: int


@dataclass(frozen=True, slots=True)
class DropTask:
    """This task will not be trained on."""

    task: int
    cause: str


@dataclass(frozen=True, slots=True)
class AdmitStep:
    """The step trains on these tasks: for each, the samples that were scored."""

    step: int
    tasks: Mapping[int, tuple[int, ...]]
    zero_variance: int
    """Groups among them in which every rollout earned the same, and nothing can be learned from a comparison."""


Decision = IssueRollout | DropTask | AdmitStep


# -- the rule ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TaskGroup:
    """What is known of one task's rollouts."""

    running: set[int] = field(default_factory=set)
    metrics: dict[int, float] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)

    @property
    def has_zero_variance(self) -> bool:
        """Whether its rollouts cannot be told apart, nor from the greedy answer where there is one. One alone compares
        with nothing, and is not level. DAPO's filter (2503.14476), where a refill acts by it."""
        values = self.metrics.values()
        return len(values) > 1 and bool(has_zero_variance(min(values), max(values)))

    def sampled(self, size: int) -> tuple[int, ...]:
        """The rollouts of the group that were scored."""
        return tuple(sample for sample in sorted(self.metrics) if sample < size)


class CollectionScheduler:
    """Decides for one run. Feed it events in the order they happen; do what it answers, in that order."""

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
        """tasks: groups a step. refill: how many times `tasks` a step may issue in place of level groups; 0 keeps them.
        Groups that failed are replaced within the same bound, or within `tasks` where it is 0.
        retries: attempts after the first. first: the ordinal to issue next. greedy: whether each task is answered
        greedily too. min_group_size: a group with fewer scored rollouts has failed.
        """
        self._tasks, self._size, self._refill, self._retries = tasks, group_size, refill, retries
        self.max_tasks = tasks * (1 + max(refill, 1))
        """How many tasks a step may issue in all."""
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
        """How many rollouts are under way."""
        return sum(len(group.running) for group in self._groups.values())

    def resume(
        self,
        scored: Mapping[int, Mapping[int, float]],
        unfinished: Mapping[tuple[int, int], int],
        dropped: int = 0,
    ) -> list[IssueRollout]:
        """Take up what a killed run left: tasks that were neither admitted nor dropped.

        scored: for each such task, the metric of each sample that was scored. unfinished: the rollouts that were not,
        with how many attempts at each have failed; they are issued again. dropped: how many tasks the step that was
        open had dropped already; one that dropped all it may has failed, and begins anew.
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
        """What follows from one event."""
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
        """Set aside what teaches nothing, issue in its place, admit once there is enough."""
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
        """The reason for which a group that ended cannot be trained on; empty where it can."""
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
        """The first groups that can be trained on; where the bound left too few, level ones fill up."""
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
