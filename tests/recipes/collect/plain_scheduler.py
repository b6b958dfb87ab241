"""A plain scheduler of steps without staleness: the oracle of the real one at a bound of 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from etude.records import has_zero_variance

DecisionTuple = tuple[Any, ...]
"""A decision: ("issue", task, sample), ("drop", task, cause) or ("admit", step, tasks, zero_variance)."""


@dataclass
class Group:
    """The rollouts of one task."""

    running: set[int] = field(default_factory=set)
    metrics: dict[int, float] = field(default_factory=dict)

    @property
    def zero_variance(self) -> bool:
        """Return True if all rollouts have the same reward."""
        values = self.metrics.values()
        return len(values) > 1 and bool(has_zero_variance(min(values), max(values)))

    def sampled(self, size: int) -> tuple[int, ...]:
        """Return the samples that were scored."""
        return tuple(sample for sample in sorted(self.metrics) if sample < size)


@dataclass
class PlainScheduler:
    """A scheduler of one open step at a time. It counts its groups and those that it issued, without windows."""

    tasks: int
    group_size: int
    refill: int
    greedy: bool = False
    min_group_size: int = 1
    next: int = 0
    open: int = 0
    issued: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    zero_variance: dict[int, Group] = field(default_factory=dict)

    @property
    def max_tasks(self) -> int:
        """Return the largest number of groups that a step may issue."""
        return self.tasks * (1 + max(self.refill, 1))

    def resume(
        self, scored: dict[int, dict[int, float]], unfinished: Iterable[tuple[int, int]], dropped: int
    ) -> list[DecisionTuple]:
        """Take over the open tasks of a killed run."""
        self.issued = dropped % self.max_tasks
        for task, metrics in scored.items():
            self.groups[task] = Group(metrics=dict(metrics))
        for task, sample in sorted(unfinished):
            self.groups.setdefault(task, Group()).running.add(sample)
        self.next = max([self.next, *(task + 1 for task in self.groups)])
        return [("issue", task, sample) for task, sample in sorted(unfinished)]

    def opened(self, step: int) -> list[DecisionTuple]:
        """Open a step."""
        self.open = step
        self.issued += len(self.groups)
        return self.settle(sorted(self.groups))

    def finished(self, task: int, sample: int, metric: float) -> list[DecisionTuple]:
        """Record the metric of a rollout."""
        self.groups[task].running.remove(sample)
        self.groups[task].metrics[sample] = metric
        return self.settle([task])

    def failed(self, task: int, sample: int) -> list[DecisionTuple]:
        """Record a failed rollout."""
        self.groups[task].running.remove(sample)
        return self.settle([task])

    def settle(self, touched: Iterable[int]) -> list[DecisionTuple]:
        """Drop failed groups, set aside those of zero variance, issue others, and admit."""
        decisions: list[DecisionTuple] = []
        for task in touched:
            group = self.groups[task]
            if group.running:
                continue
            if cause := self.failure(group):
                del self.groups[task]
                decisions.append(("drop", task, cause))
            elif self.refill and group.zero_variance:
                self.zero_variance[task] = self.groups.pop(task)
        while len(self.groups) < self.tasks and self.issued < self.max_tasks:
            samples = range(self.group_size + self.greedy)
            self.groups[self.next] = Group(running=set(samples))
            decisions += [("issue", self.next, sample) for sample in samples]
            self.next, self.issued = self.next + 1, self.issued + 1
        if not any(group.running for group in self.groups.values()):
            decisions += self.admit()
        return decisions

    def failure(self, group: Group) -> str:
        """Return the reason why a group cannot be trained on, or an empty string."""
        scored = len(group.sampled(self.group_size))
        if not scored:
            return "every rollout failed"
        if scored < self.min_group_size:
            return "too few rollouts are left"
        return "the greedy answer failed" if self.greedy and self.group_size not in group.metrics else ""

    def admit(self) -> list[DecisionTuple]:
        """Admit the first groups, and fill up with groups of zero variance."""
        for task in sorted(self.zero_variance)[: max(self.tasks - len(self.groups), 0)]:
            self.groups[task] = self.zero_variance.pop(task)
        dropped: list[DecisionTuple] = [
            ("drop", task, "every rollout earned the same") for task in sorted(self.zero_variance)
        ]
        chosen = sorted(self.groups)[: self.tasks]
        tasks = {task: self.groups[task].sampled(self.group_size) for task in chosen}
        zero_variance = sum(self.groups.pop(task).zero_variance for task in chosen)
        self.zero_variance.clear()
        self.issued = 0
        return [*dropped, ("admit", self.open, tasks, zero_variance)]
