"""A simulated run: its seconds are those that one can count by hand, and its rules are those of a real run."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.recipes.collect.scheduler import (
    AdmitStep,
    CollectionScheduler,
    Decision,
    DropTask,
    IssueRollout,
    RolloutFailed,
    RolloutFinished,
    SchedulerEvent,
    StepOpened,
    VersionPublished,
)
from etude.recipes.collect.step_windows import TaskGroup
from etude.tools.simulate.cluster import Cluster
from etude.tools.simulate.options import SimulateOptions
from etude.tools.simulate.report import _replay_table
from etude.tools.simulate.search import Trial
from etude.tools.simulate.simulation import Simulation, SimulationResult
from etude.tools.simulate.workload import SimulatedRollout, SyntheticWorkload, TraceWorkload, Turn


def rollout(
    *turns: tuple[float, float], metric: float = 0.0, failures: int = 0, before: float = 0.0
) -> SimulatedRollout:
    """A rollout with these turns."""
    tokens = int(sum(work for work, _ in turns))
    return SimulatedRollout(tuple(Turn(*turn) for turn in turns), tokens, metric, failures, before)


def scheduler(steps: int, staleness: int, tasks: int = 1, size: int = 1, refill: int = 0) -> CollectionScheduler:
    """The scheduler of a run."""
    return CollectionScheduler(tasks=tasks, group_size=size, refill=refill, max_staleness=staleness, last_step=steps)


def simulate(
    cluster: Cluster, drawn: dict[int, dict[int, SimulatedRollout]], steps: int, staleness: int, **given: int
) -> SimulationResult:
    """A run of recorded rollouts."""
    plan = scheduler(steps, staleness, **given)
    return Simulation(cluster, TraceWorkload(drawn), plan, steps=steps, retries=1).run()


def one_engine(slots: int = 1, **given: Any) -> Cluster:
    """An engine that draws a token in a second, and a trainer that takes ten."""
    return Cluster(1, slots, lambda running: 1.0, lambda step, tokens: 10.0, **given)


def test_without_staleness_sampling_and_training_take_turns() -> None:
    drawn = {task: {0: rollout((20.0, 0.0))} for task in range(3)}
    result = simulate(one_engine(publish_s=2.0, pause_s=2.0, judge_s=1.0, between_s=lambda step: 3.0), drawn, 3, 0)
    assert [step.seconds for step in result.steps] == [21 + 10 + 2 + 3] * 3 and result.seconds == 3 * 36
    assert [step.wait_s for step in result.steps] == [21] * 3 and result.staleness == {0: 3}
    assert result.busy == pytest.approx(20 / 36) and result.trained == result.finished == [20, 20, 20]


def test_with_staleness_the_engine_goes_on_while_the_trainer_computes() -> None:
    drawn = {task: {0: rollout((20.0, 0.0))} for task in range(4)}
    result = simulate(one_engine(), drawn, 4, 1)
    assert [step.seconds for step in result.steps] == [30, 20, 20, 20], "the engine is the slower one"
    assert result.staleness == {0: 2, 1: 2} or result.staleness == {0: 1, 1: 3}
    waits = [step.wait_s for step in result.steps]
    assert waits == [20, 10, 10, 10] and [step.last_tokens for step in result.steps] == [20] * 4


def test_on_shared_processors_staleness_gains_nothing_from_computing_side_by_side() -> None:
    drawn = {task: {0: rollout((20.0, 0.0))} for task in range(4)}
    result = simulate(one_engine(shares_processors=True), drawn, 4, 1)
    assert [step.seconds for step in result.steps] == [40, 30, 30, 20], "an update beside a rollout takes 20 seconds"
    assert [step.wait_s for step in result.steps] == [20, 10, 10, 10]


def test_engines_stand_still_at_the_end_of_a_publish() -> None:
    drawn = {task: {0: rollout((20.0, 0.0))} for task in range(4)}
    result = simulate(one_engine(publish_s=5.0, pause_s=3.0), drawn, 4, 1)
    assert [step.seconds for step in result.steps] == [35, 23, 23, 23], (
        "10 of training, 5 of publishing, 3 of them still"
    )
    assert [step.wait_s for step in result.steps] == [20, 8, 8, 8]


def test_a_tool_holds_no_slot() -> None:
    drawn = {0: {0: rollout((5.0, 100.0), (5.0, 0.0)), 1: rollout((20.0, 0.0))}}
    result = simulate(one_engine(), drawn, 1, 0, size=2)
    assert result.steps[0].wait_s == 110 and result.steps[0].last_tool_s == 100


def test_a_tool_holds_its_runner() -> None:
    drawn = {0: {sample: rollout((5.0, 100.0), before=2.0) for sample in range(4)}}
    cluster = one_engine(slots=4, attempts=2)
    assert simulate(cluster, drawn, 1, 0, size=4).steps[0].wait_s == 2 * 107
    drawn[0][0] = rollout((5.0, 100.0), before=2.0, failures=1)
    assert simulate(cluster, drawn, 1, 0, size=4).steps[0].wait_s == 3 * 107, "an attempt again has the same runner"


def test_staleness_gains_no_more_than_the_runners_allow() -> None:
    """Four rollouts of a step take 100 s each, and its update takes 10 s."""
    drawn = {task: {sample: rollout((1.0, 99.0)) for sample in range(4)} for task in range(12)}
    free, bound = (
        simulate(one_engine(slots=16, attempts=attempts), drawn, 12, 2, size=4).seconds for attempts in (None, 4)
    )
    assert bound == 12 * 100 + 10, "the updates are hidden, and nothing else"
    assert free < 0.5 * bound


def test_a_table_shows_trials_with_and_without_a_limit_of_attempts() -> None:
    drawn = {0: {0: rollout((5.0, 0.0))}}
    trials = [
        Trial(0, 0, 1, False, simulate(one_engine(attempts=attempts), drawn, 1, 0), 1.0, attempts=attempts)
        for attempts in (None, 2)
    ]
    shown = next(column for column in _replay_table(trials).columns if column.header == "attempts")
    assert list(shown.cells) == ["", "2"]


def test_a_rollout_that_fails_is_made_again_and_then_left_out() -> None:
    drawn = {0: {0: rollout((5.0, 0.0), failures=1), 1: rollout((7.0, 0.0), failures=2)}, 1: {0: rollout((1.0, 0.0))}}
    result = simulate(one_engine(slots=2), drawn, 1, 0, size=2)
    assert result.steps[0].wait_s == 14 and result.failed_attempts == 3 and result.trained == [5]
    drawn[0][0] = rollout((5.0, 0.0), failures=2)
    result = simulate(one_engine(slots=2), drawn, 1, 0, size=2)
    assert result.dropped == {"every rollout failed": 1} and result.steps[0].tasks == (1,)


def test_steps_at_the_beginning_are_left_out() -> None:
    drawn = {task: {0: rollout((20.0, 0.0))} for task in range(6)}
    plan = scheduler(6, 1)
    result = Simulation(one_engine(), TraceWorkload(drawn), plan, steps=6, skip=3).run()
    assert [step.step for step in result.steps] == [4, 5, 6] and result.seconds == 60
    assert result.busy == pytest.approx(50 / 60), "the engine has no work for the last step's training"


# -- laws of any run --------------------------------------------------------------------------------------------------


def random_workload(seed: int, size: int) -> SyntheticWorkload:
    """Rollouts with turns, tools and failures, and a long tail."""
    options = SimulateOptions(
        group_size=size,
        tokens=200,
        spread=1.5,
        max_tokens=20_000,
        turns=1.0 + seed % 3,
        wait_s=10.0 * (seed % 2),
        failing=0.05 * (seed % 4),
        zero_variance=0.3,
        seed=seed,
    )
    return SyntheticWorkload(options)


def random_run(seed: int, staleness: int, kind: Any = CollectionScheduler, **given: Any) -> SimulationResult:
    """A run on a few engines, which are lost from time to time."""
    cluster = Cluster(
        engines=4,
        slots=6,
        token_s=lambda running: 0.01 + 0.001 * running,
        update_s=lambda step, tokens: tokens / 2000 * (1 + step % 3),
        publish_s=2.0,
        pause_s=1.0,
        failures_per_day=200.0 * (seed % 5),
        restart_s=20.0,
    )
    options = {"tasks": 6, "group_size": 3, "refill": seed % 3, "max_staleness": staleness} | given
    plan = kind(**options, last_step=12)
    return Simulation(cluster, random_workload(seed, 3), plan, steps=12, seed=seed).run()


@given(seed=st.integers(0, 10**6), staleness=st.sampled_from([0, 1, 2, 5]))
@settings(max_examples=25)
def test_no_rollout_is_older_than_the_bound_and_none_is_left(seed: int, staleness: int) -> None:
    result = random_run(seed, staleness)
    assert len(result.steps) == 12 and max(result.staleness) <= staleness
    assert result.seconds == pytest.approx(sum(step.seconds for step in result.steps))
    tasks = [task for step in result.steps for task in step.tasks]
    assert tasks == sorted(set(tasks)), "in the order of their ordinals, each once"
    trained, finished = Counter(result.trained), Counter(result.finished)
    assert trained <= finished and 0 < result.busy <= 1


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10)
def test_steps_train_on_the_same_rollouts_at_every_bound(seed: int) -> None:
    runs = [random_run(seed, staleness) for staleness in (0, 1, 4)]
    assert len({tuple(step.tasks for step in run.steps) for run in runs}) == 1
    assert len({tuple(sorted(run.trained)) for run in runs}) == 1


@pytest.mark.slow
def test_more_staleness_takes_no_longer() -> None:
    seconds = [np.mean([random_run(seed, staleness).seconds for seed in range(6)]) for staleness in (0, 1, 2, 4)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.3 * seconds[-1]


# -- lengths ----------------------------------------------------------------------------------------------------------


class DropsTheOld(CollectionScheduler):
    """Keeps groups on their way, trains on those that end first, and drops what the bound then leaves too old."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ready: list[int] = []
        self.issued_at: dict[int, int] = {}

    def handle(self, event: SchedulerEvent) -> list[Decision]:
        match event:
            case StepOpened(step):
                self._opened = step
            case VersionPublished(version, _):
                self._floor = version
            case RolloutFinished(task, sample, metric) if task in self._line:
                group = self._line[task]
                group.running.remove(sample)
                group.metrics[sample] = metric
                self.ready += [task] * (not group.running)
            case RolloutFailed(task, sample) if task in self._line:
                self._line[task].running.remove(sample)
        decisions: list[Decision] = []
        for task in [task for task, version in self.issued_at.items() if self._opened - 1 - version > self._staleness]:
            del self.issued_at[task], self._line[task]
            decisions.append(DropTask(task, "too old"))
        self.ready = [task for task in self.ready if task in self._line]
        while len(self._line) < (self._staleness + 1) * self._tasks:
            task, self._next = self._next, self._next + 1
            self.issued_at[task] = self._floor
            group = self._line[task] = TaskGroup(task, self._windows.append())
            group.floor, group.running = self._floor, set(range(self._size))
            decisions += [IssueRollout(task, sample, self._floor) for sample in range(self._size)]
        if self._opened > self._step and len(self.ready) >= self._tasks:
            chosen, self.ready = self.ready[: self._tasks], self.ready[self._tasks :]
            tasks = {task: self._line.pop(task).sampled(self._size) for task in chosen}
            for task in chosen:
                del self.issued_at[task]
            self._step = self._opened
            decisions.append(AdmitStep(self._step, tasks, 0, 0))
        return decisions


def kolmogorov_smirnov(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest distance of two empirical distributions, in units of its limit at the level of 0.1 %."""
    points = np.sort(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (one, other)]
    limit = math.sqrt(-math.log(0.001 / 2) / 2) * math.sqrt((len(one) + len(other)) / (len(one) * len(other)))
    return float(np.abs(shares[0] - shares[1]).max()) / limit


def lengths(kind: Any, seed: int) -> tuple[list[int], list[int]]:
    """The lengths that a run trains on, and those of as many rollouts as they come."""
    workload = SyntheticWorkload(SimulateOptions(group_size=1, tokens=400, spread=1.2, max_tokens=30_000, seed=seed))
    cluster = Cluster(16, 8, lambda running: 0.01, lambda step, tokens: 4.0)
    plan = kind(tasks=32, group_size=1, refill=0, max_staleness=2, last_step=60)
    trained = Simulation(cluster, workload, plan, steps=60).run().trained
    fresh = SyntheticWorkload(SimulateOptions(group_size=1, tokens=400, spread=1.2, max_tokens=30_000, seed=seed + 99))
    return trained, [fresh.draw(task, 0).tokens for task in range(len(trained))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_lengths_that_are_trained_are_those_that_finish(seed: int) -> None:
    """Kolmogorov and Smirnov tell a policy that drops what is too old: it trains on short answers."""
    assert kolmogorov_smirnov(*lengths(CollectionScheduler, seed)) < 1
    dropping, all_lengths = lengths(DropsTheOld, seed)
    assert kolmogorov_smirnov(dropping, all_lengths) > 2 and np.mean(dropping) < 0.8 * np.mean(all_lengths)


@given(seed=st.integers(0, 10**6), staleness=st.sampled_from([0, 2, 4]))
@settings(max_examples=10)
def test_where_nothing_fails_exactly_what_finished_is_trained(seed: int, staleness: int) -> None:
    seed -= seed % 20  # no failures, no lost engines
    result = random_run(seed, staleness, refill=0)
    assert Counter(result.trained) == Counter(result.finished)


def long_tail(staleness: int, window: int | None) -> SimulationResult:
    """A run whose longest rollouts take as long as several steps."""
    workload = SyntheticWorkload(SimulateOptions(group_size=2, tokens=300, spread=1.4, max_tokens=30_000, seed=5))
    cluster = Cluster(16, 16, lambda running: 0.01, lambda step, tokens: 6.0)
    scheduler = CollectionScheduler(
        tasks=12, group_size=2, refill=0, max_staleness=staleness, window=window, last_step=40
    )
    return Simulation(cluster, workload, scheduler, steps=40).run()


def test_quick_groups_first_is_nearly_as_fast_with_younger_rollouts() -> None:
    """Nothing is left out, and the rollouts of the first steps are shorter than the others."""
    ordinal, windowed = long_tail(8, None), long_tail(8, 24)
    means = [sum(stale * number for stale, number in run.staleness.items()) / 960 for run in (ordinal, windowed)]
    assert means[1] < 0.4 * means[0] and max(windowed.staleness) <= 8
    assert windowed.seconds < 1.2 * ordinal.seconds < 0.8 * long_tail(2, None).seconds
    assert Counter(windowed.trained) == Counter(ordinal.trained) == Counter(windowed.finished)
    assert windowed.steps[0].tokens < 0.7 * np.mean([step.tokens for step in windowed.steps[10:-10]])
    old, young = (windowed.tokens_by_staleness[each] / windowed.staleness[each] for each in (5, 2))
    assert old > 1.5 * young, "slow rollouts are the stalest"


# -- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_million_rollouts_on_ten_thousand_engines_take_less_than_two_minutes() -> None:
    workload = SyntheticWorkload(
        SimulateOptions(group_size=8, tokens=2000, spread=1.0, max_tokens=16_384, zero_variance=0.2)
    )
    cluster = Cluster(10_000, 64, lambda running: 0.008 + 3e-5 * running, lambda step, tokens: tokens / 2e7, 5.0, 5.0)
    plan = CollectionScheduler(tasks=1024, group_size=8, refill=1, max_staleness=4)
    began = time.process_time()
    result = Simulation(cluster, workload, plan, steps=100).run()
    assert len(result.finished) > 1_000_000 and max(result.staleness) == 4
    assert time.process_time() - began < 120
