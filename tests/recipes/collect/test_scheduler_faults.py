"""The scheduler under faults: no rollout is older than the bound, nothing hangs, and nothing is lost or done twice.

Each rule of the scheduler has a mutant that breaks it, and the faulty run finds each one.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.recipes.collect.plain_scheduler import DecisionTuple, PlainScheduler
from tests.recipes.collect.scheduler_faults import Case, FaultyRun, options

SEEDS = st.integers(0, 10**9)


# -- at max_staleness=0 -----------------------------------------------------------------------------------------------


def as_tuples(decisions: Sequence[Decision]) -> list[DecisionTuple]:
    """Return decisions in the form of the plain scheduler."""
    result: list[DecisionTuple] = []
    for decision in decisions:
        match decision:
            case IssueRollout(task, sample, _):
                result.append(("issue", task, sample))
            case DropTask(task, cause):
                result.append(("drop", task, cause))
            case AdmitStep(step, tasks, level, _):
                result.append(("admit", step, tasks, level))
    return result


def open_step(scheduler: CollectionScheduler, step: int) -> list[DecisionTuple]:
    """Return the decisions when a step opens, after the weights of the previous step are published."""
    published = scheduler.handle(VersionPublished(step - 1, step - 1))
    return as_tuples([*published, *scheduler.handle(StepOpened(step))])


class Both:
    """The scheduler and the plain one, over the same events."""

    def __init__(self, case: Case) -> None:
        self.case, self.chance = case, random.Random(case.seed)
        self.ours = case.scheduler(CollectionScheduler)
        self.oracle = PlainScheduler(**options(case))
        self.events = 0
        self.failures: dict[tuple[int, int], int] = {}
        self.scored: dict[int, dict[int, float]] = {}
        self.dropped: list[int] = []

    def run(self) -> int:
        """Run some steps with kills, and return the number of events."""
        for step in range(1, self.case.steps + 1):
            self.step(step)
        return self.events

    def step(self, step: int) -> None:
        """Run one step to its admission."""
        decisions = open_step(self.ours, step)
        assert decisions == self.oracle.opened(step)
        running: list[tuple[int, int]] = []
        self.dropped = []
        while True:
            running += [(task, sample) for kind, task, sample, *_ in decisions if kind == "issue"]
            self.dropped += [task for kind, task, *_ in decisions if kind == "drop"]
            if decisions and decisions[-1][0] == "admit":
                assert not running and self.ours.next_task == self.oracle.next
                self.scored.clear()
                return
            assert self.ours.running == len(running)
            if self.chance.random() < self.case.killing:
                decisions, running = self.kill(step, running), []
                continue
            self.events += 1
            decisions = self.end(*running.pop(self.chance.randrange(len(running))))

    def end(self, task: int, sample: int) -> list[DecisionTuple]:
        """End a rollout."""
        fails, metric, _ = self.case.ends(task, sample)
        if self.failures.get((task, sample), 0) < fails:
            self.failures[task, sample] = self.failures.get((task, sample), 0) + 1
            if self.failures[task, sample] <= self.case.retries:
                return [("issue", task, sample)]
            ours: SchedulerEvent = RolloutFailed(task, sample)
            oracle = self.oracle.failed(task, sample)
        else:
            self.scored.setdefault(task, {})[sample] = metric
            ours, oracle = RolloutFinished(task, sample, metric), self.oracle.finished(task, sample, metric)
        decisions = as_tuples(self.ours.handle(ours))
        assert decisions == oracle
        return decisions

    def kill(self, step: int, running: Sequence[tuple[int, int]]) -> list[DecisionTuple]:
        """Create both again from the recorded events, and open the same step."""
        gone = set(self.dropped)
        scored = {task: metrics for task, metrics in self.scored.items() if task not in gone}
        for task, _ in running:
            scored.setdefault(task, {})
        first = self.ours.next_task
        self.ours = self.case.scheduler(CollectionScheduler, first=first, step=step - 1, floor=step - 1)
        self.oracle = PlainScheduler(**options(self.case), next=first)
        line = [OpenGroup(task, scored[task], [s for t, s in running if t == task]) for task in scored]
        self.ours.resume([*line, *(OpenGroup(task, dropped=True) for task in gone)])
        again = self.oracle.resume(scored, running, len(gone))
        decisions, expected = open_step(self.ours, step), [*again, *self.oracle.opened(step)]
        assert sorted(decisions, key=str) == sorted(expected, key=str)
        return decisions


@given(SEEDS)
@settings(max_examples=80)
def test_without_staleness_each_decision_equals_that_of_the_plain_scheduler(seed: int) -> None:
    Both(Case.drawn(seed, max_staleness=0)).run()


@pytest.mark.soak
def test_without_staleness_each_decision_equals_that_of_the_plain_scheduler_in_long_runs() -> None:
    assert sum(Both(Case.drawn(seed, max_staleness=0)).run() for seed in range(6000)) > 300_000


# -- with any staleness -----------------------------------------------------------------------------------------------


@given(SEEDS)
@settings(max_examples=60)
def test_the_bound_holds_and_no_task_hangs_is_lost_or_done_twice(seed: int) -> None:
    FaultyRun(Case.drawn(seed)).run()


@pytest.mark.parametrize("staleness", [1, 2, 4, 7])
def test_the_bound_is_reached(staleness: int) -> None:
    runs = [FaultyRun(Case.drawn(seed, max_staleness=staleness, steps=12)).run() for seed in range(3)]
    assert max(max(run.staleness) for run in runs) == staleness


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_the_bound_holds_over_a_million_faults(part: int) -> None:
    """Run a quarter of them: failed attempts, lost engines, weights that arrive late or never, and kills."""
    faults = kills = 0
    seed = 10_000 * part
    while faults < 250_000:
        often = {"failing": 0.4, "killing": 0.01, "engines": 8} if seed % 4 else {}
        run = FaultyRun(Case.drawn(seed, steps=60, **often)).run()
        faults, kills, seed = faults + run.faults, kills + run.kills, seed + 1
    assert kills > 1000


def test_a_resumed_run_keeps_a_lower_bound() -> None:
    """Groups that are too old for a lower bound are dropped whole, with that cause, and are no failures of a step."""
    causes: set[str] = set()
    for seed in range(20):
        given: dict[str, Any] = {"steps": 12, "failing": 0.0, "level": 0.0, "min_group_size": 1, "greedy": False}
        run = FaultyRun(Case.drawn(seed, max_staleness=6, killing=0.0, **given))
        while run.trained < 6 or max(run.journal.admitted) > run.trained:
            run.tick()
        run.journal.saved = run.trained
        run.case = Case.drawn(seed, max_staleness=seed % 3, killing=0.02 * (seed % 2), **given)
        run.kill()
        while run.trained < run.case.steps:
            run.tick()
        assert run.journal.issued == run.journal.settled
        assert all(len(admit.tasks) == run.case.tasks for admit in run.journal.admitted.values())
        causes |= set(run.journal.dropped.values())
    assert causes == {OUTDATED}


# -- mutants ----------------------------------------------------------------------------------------------------------


class Mutant(CollectionScheduler):
    """A scheduler without checks of its own, so that its mistake must be visible from outside."""

    def _is_too_old(self, group: Any) -> bool:
        return False

    def count(self, counts: Callable[[Any], bool]) -> int:
        """Return the number of such groups in the line."""
        return sum(map(counts, self._line.values()))


class OneVersionTooMany(Mutant):
    """A scheduler that issues as if the bound were larger by one."""

    def _limit(self) -> int:
        return super()._limit() + (self._staleness > 0 and self._floor + 1 + self._staleness < (self._last or 0))


class ByCount(Mutant):
    """A scheduler that divides the number of usable groups, instead of walking over windows."""

    def _latest_step_of_next(self) -> int:
        usable = self.count(lambda group: group.status.name in ("OPEN", "USABLE"))
        return self._step + 1 + usable // self._tasks


class OnlyRunning(Mutant):
    """A scheduler that ignores groups that are decided but not admitted."""

    def _latest_step_of_next(self) -> int:
        return self._step + 1 + self.count(lambda group: group.status.name == "OPEN") // self._tasks


class ByLength(Mutant):
    """A scheduler that counts failed groups as usable."""

    def _latest_step_of_next(self) -> int:
        return self._step + 1 + len(self._line) // self._tasks


class AllAtOnce(Mutant):
    """A scheduler that issues all interrupted rollouts at once after a kill, for any policy version."""

    def _latest_step(self, group: Any) -> int:
        return 0


class TrainersVersion(Mutant):
    """A scheduler that takes the trainer's version for that of the engines."""

    def handle(self, event: SchedulerEvent) -> list[Decision]:
        if isinstance(event, VersionPublished):
            event = VersionPublished(event.version, event.version)
        return super().handle(event)


class NoLastStep(Mutant):
    """A scheduler that issues beyond the last step."""

    def _limit(self) -> int:
        return self._floor + 1 + self._staleness if self._staleness else super()._limit()


class ForgetsDropped(Mutant):
    """A scheduler whose windows lack the groups that were dropped before a kill."""

    def resume(self, line: Sequence[OpenGroup], end: int = 0, skipped: Collection[int] = ()) -> None:
        super().resume([group for group in line if not group.dropped], end, skipped)


class ForgetsTheEnd(Mutant):
    """A scheduler that counts the dropped groups of earlier steps in the windows of later ones."""

    def resume(self, line: Sequence[OpenGroup], end: int = 0, skipped: Collection[int] = ()) -> None:
        super().resume(line)


class AdmitsEarly(Mutant):
    """A scheduler that trains on the groups that are ready first."""

    def handle(self, event: SchedulerEvent) -> list[Decision]:
        decisions = super().handle(event)
        ready = [group for group in self._line.values() if group.status.name == "USABLE"]
        if self._opened > self._step and len(ready) >= self._tasks and not self._windows.first_is_decided:
            chosen = ready[: self._tasks]
            for group in chosen:
                del self._line[group.task]
            self._step = self._opened
            tasks = {group.task: group.sampled(self._size) for group in chosen}
            decisions.append(AdmitStep(self._step, tasks, 0, chosen[-1].task + 1))
        return decisions


class Windowed(Mutant):
    """A scheduler that trains on quick groups before slow ones."""


class ForgetsDeadlines(Windowed):
    """A scheduler that skips groups which are then too old."""

    def _deadline(self, group: Any) -> float:
        return math.inf


class ForgetsSkipped(Windowed):
    """A scheduler whose windows lack the groups that failed after a step had skipped them."""

    def resume(self, line: Sequence[OpenGroup], end: int = 0, skipped: Collection[int] = ()) -> None:
        super().resume(line, end)


class KeepsFailed(Windowed):
    """A scheduler that counts failed groups twice."""

    def _take(self, groups: Sequence[Any]) -> None:
        super()._take([group for group in groups if group.status.is_candidate])


FINDS = {
    OneVersionTooMany: "staleness of",
    ByCount: "staleness of",
    OnlyRunning: "staleness of",
    AllAtOnce: "staleness of",
    TrainersVersion: "older than the floor|staleness of",
    ByLength: "waits for",
    NoLastStep: "no step trains on it",
    ForgetsDropped: "depends on",
    ForgetsTheEnd: "depends on|staleness of",
    AdmitsEarly: ".",
    ForgetsDeadlines: "staleness of",
    ForgetsSkipped: "gives up after",
    KeepsFailed: "settled twice",
}


@pytest.mark.parametrize("mutant", FINDS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_rule_is_found(mutant: type[CollectionScheduler]) -> None:
    messages = set()
    for seed in range(400):
        try:
            case = Case.drawn(seed, max_staleness=1 + seed % 7, window=None)
            if issubclass(mutant, Windowed):
                case = replace(case, window=2 * case.tasks, failing=0.4, killing=0.02)
            FaultyRun(case, mutant).run()
        except (AssertionError, KeyError) as error:
            messages.add(str(error))
            if re.search(FINDS[mutant], str(error)):
                return
    pytest.fail(f"found as {messages or 'nothing'}, not as {FINDS[mutant]}")
