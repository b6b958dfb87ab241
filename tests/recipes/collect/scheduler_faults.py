"""A simulated run with many faults, which checks the scheduler from outside, by real policy versions.

The faults are slow and failed rollouts, lost engines, weights that arrive late or only at some engines, and kills with
a replay.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
from etude.records import has_zero_variance

Rollout = tuple[int, int]


class Hang(AssertionError):
    """The trainer waits, but no rollout runs."""


@dataclass(frozen=True)
class Case:
    """The options of a run, and the ends of its rollouts, which depend on task and sample only."""

    seed: int
    tasks: int
    group_size: int
    refill: int
    retries: int
    greedy: bool
    min_group_size: int
    max_staleness: int
    window: int | None
    steps: int
    engines: int
    failing: float
    level: float
    killing: float

    @classmethod
    def drawn(cls, seed: int, **given: Any) -> Case:
        """Draw random options."""
        draw = random.Random(seed)
        size = draw.choice((1, 2, 3))
        tasks = draw.randint(1, 4)
        options = {
            "tasks": tasks,
            "group_size": size,
            "refill": draw.choice((0, 0, 1, 2)),
            "retries": draw.choice((0, 1)),
            "greedy": draw.random() < 0.2,
            "min_group_size": draw.randint(1, size),
            "max_staleness": draw.choice((0, 0, 1, 1, 2, 3, 4, 5, 6, 7)),
            "steps": draw.randint(1, 14),
            "engines": draw.randint(1, 4),
            "failing": draw.choice((0.0, 0.1, 0.4)),
            "level": draw.choice((0.0, 0.3, 0.7)),
            "killing": draw.choice((0.0, 0.003, 0.02)),
            "window": draw.choice((None, None, *(tasks + draw.randint(1, 3 * tasks) for _ in range(2)))),
        }
        return cls(seed, **(options | given))

    def ends(self, task: int, sample: int) -> tuple[int, float, bool]:
        """Return the number of failed attempts, the reward after them, and True if the rollout is slow."""
        draw = random.Random((self.seed * 1_000_003 + task) * 64 + sample)
        fails = draw.choice((1, 2, 9)) if draw.random() < self.failing else 0
        level = random.Random(self.seed * 1_000_003 + task).random() < self.level
        return fails, 0.5 if level else float(sample), draw.random() < 0.1

    @property
    def samples(self) -> range:
        """Return the samples of a task, the greedy one last."""
        return range(self.group_size + self.greedy)

    @property
    def longest(self) -> int:
        """Return the largest number of groups that a step may look at."""
        return self.tasks * (1 + max(self.refill, 1))

    def scheduler(self, kind: type[CollectionScheduler], **more: int) -> CollectionScheduler:
        """Return a scheduler with these options."""
        return kind(
            tasks=self.tasks,
            group_size=self.group_size,
            refill=self.refill,
            greedy=self.greedy,
            min_group_size=self.min_group_size,
            max_staleness=self.max_staleness,
            window=self.window,
            last_step=self.steps,
            **more,
        )

    def steps_by_hand(self) -> list[dict[int, tuple[int, ...]]]:
        """Return the tasks of each step by a walk over the ordinals, without time or events."""
        steps: list[dict[int, tuple[int, ...]]] = []
        task = 0
        while len(steps) < self.steps:
            usable: dict[int, tuple[int, ...]] = {}
            others: dict[int, tuple[int, ...]] = {}
            for _ in range(self.longest):
                scored = {s: self.ends(task, s)[1] for s in self.samples if self.ends(task, s)[0] <= self.retries}
                sampled = tuple(sample for sample in scored if sample < self.group_size)
                failed = len(sampled) < self.min_group_size or (self.greedy and self.group_size not in scored)
                values = scored.values()
                level = len(values) > 1 and has_zero_variance(min(values), max(values))
                if not failed:
                    (others if self.refill and level else usable)[task] = sampled
                task += 1
                if len(usable) == self.tasks:
                    break
            filled = sorted(others)[: self.tasks - len(usable)]
            chosen = dict(sorted((usable | {each: others[each] for each in filled}).items()))
            if chosen:  # otherwise all of them failed, and the step starts again
                steps.append(chosen)
        return steps


@dataclass
class Written:
    """The contents of the run's journal."""

    issued: set[int] = field(default_factory=set)
    scored: dict[Rollout, tuple[float, int]] = field(default_factory=dict)
    """The metric and the oldest version of each scored rollout."""
    failures: dict[Rollout, int] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    admitted: dict[int, AdmitStep] = field(default_factory=dict)
    saved: int = 0
    seen: set[int] = field(default_factory=set)
    """The tasks that an admitted step has looked at. No later step looks at them."""

    @property
    def settled(self) -> set[int]:
        """Return the tasks that were admitted or dropped."""
        return {task for admit in self.admitted.values() for task in admit.tasks} | set(self.dropped)


@dataclass
class Running:
    """A running rollout."""

    floor: int
    oldest: int | None = None
    """The version of its first token; None before it starts."""


class FaultyRun:
    """One run from its first step to its last."""

    def __init__(self, case: Case, kind: type[CollectionScheduler] = CollectionScheduler) -> None:
        self.case, self.kind = case, kind
        self.chance = random.Random(case.seed)
        self.journal = Written()
        self.events = self.kills = self.faults = 0
        self.staleness: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Start, or resume from the journal."""
        written, case = self.journal, self.case
        last = max(written.admitted, default=0)
        self.trained = written.saved
        self.versions = dict.fromkeys(range(case.engines), self.trained)
        """The version of each engine in rotation."""
        self.running: dict[Rollout, Running] = {}
        self.waits = False
        """True while the trainer waits for a step."""
        self.busy = 0
        """The ticks for which the trainer still trains, publishes, evaluates and saves."""
        first = max(written.issued, default=-1) + 1
        self.scheduler = case.scheduler(self.kind, first=first, step=last, floor=self.trained)
        end, skipped = (written.admitted[last].end, written.admitted[last].skipped) if last else (0, ())
        dropped = [OpenGroup(task, dropped=True) for task, cause in written.dropped.items() if cause != OUTDATED]
        self.scheduler.resume([*self.left(), *dropped], end, skipped)

    def left(self) -> list[OpenGroup]:
        """Return the groups that are neither admitted nor dropped."""
        groups = []
        for task in sorted(self.journal.issued - self.journal.settled):
            scored = {s: self.journal.scored[task, s] for s in self.case.samples if (task, s) in self.journal.scored}
            failed = {s: self.journal.failures.get((task, s), 0) for s in self.case.samples if s not in scored}
            groups.append(
                OpenGroup(
                    task,
                    {sample: metric for sample, (metric, _) in scored.items()},
                    [sample for sample, number in failed.items() if number <= self.case.retries],
                    min((oldest for _, oldest in scored.values()), default=None),
                )
            )
        return groups

    def run(self, most: int = 1_000_000) -> FaultyRun:
        """Run until the last step is trained, and check that no rollout is left."""
        while self.trained < self.case.steps:
            self.events += 1
            assert self.events < most, "the run does not end"
            if self.chance.random() < self.case.killing:
                self.kill()
            else:
                self.tick()
        assert not self.running and self.journal.issued == self.journal.settled, "issued, and no step trains on it"
        trained = [dict(admit.tasks) for _, admit in sorted(self.journal.admitted.items())]
        assert self.case.window or trained == self.case.steps_by_hand(), (
            "what a step trains on depends on speed, staleness or kills"
        )
        return self

    def kill(self) -> None:
        """End the process. The last checkpoint may be some steps old."""
        self.kills += 1
        self.faults += 1
        self.begin()

    def tick(self) -> None:
        """Let one thing happen."""
        late = [engine for engine, version in self.versions.items() if version < self.trained]
        acts: list[Callable[[], None]] = [self.move_rollout] * 6 * bool(self.running)
        acts += [self.move_trainer] * (2 if not self.waits else 0)
        acts += [lambda: self.update(self.chance.choice(late))] * bool(late)
        if not acts:
            raise Hang(f"step {self.trained + 1} waits for {self.scheduler.waiting_for()}")
        if self.chance.random() < 0.02:
            acts = [self.lose_or_regain]
        self.chance.choice(acts)()

    # -- events -------------------------------------------------------------------------------------------------------

    def move_rollout(self) -> None:
        """Start, continue or end a rollout."""
        key = self.chance.choice(list(self.running))
        state = self.running[key]
        fails, metric, slow = self.case.ends(*key)
        if state.oldest is None:
            state.oldest = self.chance.choice(list(self.versions.values()))
            assert state.oldest >= state.floor, "an engine in rotation is older than the floor"
        elif slow and self.chance.random() < 0.95:
            return
        elif self.journal.failures.get(key, 0) < fails:
            self.journal.failures[key] = self.journal.failures.get(key, 0) + 1
            self.faults += 1
            if self.journal.failures[key] <= self.case.retries:
                state.oldest = None
                return
            del self.running[key]
            self.tell(RolloutFailed(*key))
        else:
            self.journal.scored[key] = metric, state.oldest
            del self.running[key]
            self.tell(RolloutFinished(*key, metric))

    def move_trainer(self) -> None:
        """Let the trainer train, publish, evaluate and save, or open its next step."""
        if self.busy:
            if not self.case.max_staleness and self.busy > 1:
                assert not self.running, "without staleness nothing runs while the trainer trains"
            self.busy -= 1
            if not self.busy:
                self.publish()
            return
        step = self.trained + 1
        if step in self.journal.admitted:
            self.train(self.journal.admitted[step])
        else:
            self.waits = True
            self.tell(StepOpened(step))

    def train(self, admit: AdmitStep) -> None:
        """Start to train on an admitted step, which may be a replayed one."""
        self.waits, self.busy = False, self.chance.choice((1, 3, 10, 40))
        stale = [
            admit.step - 1 - self.journal.scored[task, sample][1]
            for task in admit.tasks
            for sample in admit.tasks[task]
        ]
        self.staleness += stale
        assert max(stale) <= self.case.max_staleness, f"staleness of {max(stale)}, not of {self.case.max_staleness}"

    def publish(self) -> None:
        """Publish a version. Some engines get it at once, others later, and some leave the rotation."""
        self.trained += 1
        begun = [state.oldest for state in self.running.values() if state.oldest is not None]
        assert min(begun, default=self.trained) >= self.trained - self.case.max_staleness, (
            "a rollout that runs needs the adapter of a version that servers no longer hold"
        )
        if self.chance.random() < 0.5:
            self.journal.saved = self.trained
        for engine in list(self.versions):
            if self.chance.random() < 0.8:
                self.versions[engine] = self.trained
                continue
            self.faults += 1
            if self.chance.random() < 0.3 and len(self.versions) > 1:
                del self.versions[engine]
        self.tell_floor()

    def update(self, engine: int) -> None:
        """Give the newest weights to an engine that was late."""
        self.versions[engine] = self.trained
        self.tell_floor()

    def lose_or_regain(self) -> None:
        """Lose an engine, so that its rollouts start again on others, or bring a lost one back."""
        engine = self.chance.randrange(self.case.engines)
        if engine not in self.versions:
            self.versions[engine] = self.trained
        elif len(self.versions) > 1:
            del self.versions[engine]
            self.faults += 1
            for state in self.running.values():
                if self.chance.random() < 0.3:
                    state.oldest = None
                    self.faults += 1
            self.tell_floor()

    # -- the scheduler ------------------------------------------------------------------------------------------------

    def tell_floor(self) -> None:
        """Send the oldest version of the engines in rotation."""
        self.tell(VersionPublished(self.trained, min(self.versions.values())))

    def tell(self, event: SchedulerEvent) -> None:
        """Send an event, then record and execute the decisions. A kill may come before they are recorded."""
        decisions = self.scheduler.handle(event)
        if self.chance.random() < self.case.killing:
            self.kill()
            return
        if any(isinstance(decision, AdmitStep) and not decision.tasks for decision in decisions):
            self.carry_out([decision for decision in decisions if not isinstance(decision, AdmitStep)])
            self.kill()  # the run ends with an error, and the user starts it again
            return
        self.carry_out(decisions)

    def carry_out(self, decisions: list[Decision]) -> None:
        """Execute decisions. No task is issued, dropped or admitted twice, and no settled task runs."""
        for decision in decisions:
            match decision:
                case IssueRollout(task, sample, floor):
                    key = task, sample
                    assert key not in self.running and key not in self.journal.scored, "issued twice"
                    assert task not in self.journal.settled, "issued after it was settled"
                    assert task in self.journal.issued or task == max(self.journal.issued, default=-1) + 1
                    self.journal.issued.add(task)
                    self.running[key] = Running(floor)
                case DropTask(task, cause):
                    assert task not in self.journal.settled, "settled twice"
                    self.journal.dropped[task] = cause
                case AdmitStep(step, tasks):
                    assert not self.journal.settled & set(tasks), "settled twice"
                    assert step == self.trained + 1 and step not in self.journal.admitted
                    self.journal.admitted[step] = decision
                    self.check_tasks(decision)
                    self.train(decision)

    def check_tasks(self, admit: AdmitStep) -> None:
        """Check that a step trains on whole groups, and on too few only after the largest number of groups."""
        written, case = self.journal, self.case
        skipped = set(admit.skipped)
        assert skipped <= written.issued - written.seen - set(admit.tasks), "it skips a settled task"
        seen = set(range(admit.end)) - skipped - written.seen
        written.seen |= seen
        assert set(admit.tasks) <= seen <= written.settled, "it looked at a task that is not settled"
        for task, samples in admit.tasks.items():
            whole = tuple(s for s in case.samples[: case.group_size] if case.ends(task, s)[0] <= case.retries)
            assert samples == whole
        fewer = len(admit.tasks) < case.tasks or (case.refill and admit.zero_variance)
        assert not fewer or len(seen) % case.longest == 0, f"gives up after {len(seen)} groups, not {case.longest}"


def options(case: Case) -> Mapping[str, Any]:
    """Return the arguments of the plain scheduler."""
    names = ("tasks", "group_size", "refill", "greedy", "min_group_size")
    return {name: getattr(case, name) for name in names}
