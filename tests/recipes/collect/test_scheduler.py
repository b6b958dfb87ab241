"""The scheduler: the groups of a step do not depend on the order in which rollouts end, and none is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.recipes.collect.scheduler import (
    AdmitStep,
    CollectionScheduler,
    Decision,
    DropTask,
    IssueRollout,
    OpenGroup,
    RolloutFailed,
    RolloutFinished,
    StepOpened,
    VersionPublished,
)

Metric = Callable[[int, int], float | None]
"""The reward of a rollout, by task and sample; None if it fails."""


def mixed(task: int, sample: int) -> float | None:
    """Return different rewards within a group, but equal ones in every third group."""
    return 1.0 if task % 3 == 0 else float(sample % 2)


def open_step(scheduler: CollectionScheduler, step: int) -> list[Decision]:
    """Return the decisions when the weights before a step are published and the step opens."""
    return [*scheduler.handle(VersionPublished(step - 1, step - 1)), *scheduler.handle(StepOpened(step))]


def play(
    scheduler: CollectionScheduler, step: int, metric: Metric, rng: random.Random
) -> tuple[AdmitStep, list[DropTask], list[IssueRollout]]:
    """Run one step to its end, with rollouts that end in random order."""
    decisions = open_step(scheduler, step)
    running: list[IssueRollout] = []
    dropped: list[DropTask] = []
    issued: list[IssueRollout] = []
    while True:
        for decision in decisions:
            if isinstance(decision, IssueRollout):
                running.append(decision)
                issued.append(decision)
            elif isinstance(decision, DropTask):
                dropped.append(decision)
        if decisions and isinstance(decisions[-1], AdmitStep):
            assert not running
            return decisions[-1], dropped, issued
        rollout = running.pop(rng.randrange(len(running)))
        reward = metric(rollout.task, rollout.sample)
        event = (
            RolloutFailed(rollout.task, rollout.sample)
            if reward is None
            else RolloutFinished(rollout.task, rollout.sample, reward)
        )
        decisions = scheduler.handle(event)


def scheduler(**changes: Any) -> CollectionScheduler:
    """Return a scheduler of four tasks with three rollouts each."""
    return CollectionScheduler(**({"tasks": 4, "group_size": 3, "refill": 0} | changes))


def test_without_a_filter_a_step_gets_the_next_tasks() -> None:
    plan, rng = scheduler(), random.Random(0)
    for step in (1, 2):
        admit, dropped, _ = play(plan, step, mixed, rng)
        assert list(admit.tasks) == list(range(4 * step - 4, 4 * step)) and not dropped
        assert admit.zero_variance == sum(task % 3 == 0 for task in admit.tasks)


@given(seed=st.integers(0, 1000), refill=st.integers(1, 3), tasks=st.integers(1, 5))
def test_groups_of_zero_variance_are_replaced_and_the_order_of_ends_changes_nothing(
    seed: int, refill: int, tasks: int
) -> None:
    first, second = (scheduler(refill=refill, tasks=tasks) for _ in range(2))
    for step in range(1, 4):
        one = play(first, step, mixed, random.Random(seed))
        other = play(second, step, mixed, random.Random(seed + 1))
        assert one[0] == other[0] and one[1] == other[1]
        assert sorted(one[2], key=repr) == sorted(other[2], key=repr)
        assert not any(task % 3 == 0 for task in one[0].tasks)
        assert all(drop.task % 3 == 0 for drop in one[1])


@given(st.integers(0, 1000))
def test_every_ordinal_is_settled_once(seed: int) -> None:
    plan, rng = scheduler(refill=2), random.Random(seed)
    settled: list[int] = []
    for step in range(1, 5):
        admit, dropped, _ = play(plan, step, mixed, rng)
        settled += [*admit.tasks, *(drop.task for drop in dropped)]
    assert sorted(settled) == list(range(plan.next_task))


def test_after_the_last_refill_groups_of_zero_variance_fill_up_and_are_counted() -> None:
    plan = scheduler(refill=2)
    admit, dropped, issued = play(plan, 1, lambda task, sample: 0.5, random.Random(0))
    assert list(admit.tasks) == [0, 1, 2, 3] and admit.zero_variance == 4
    assert len(issued) == 3 * 4 * 3 and [drop.task for drop in dropped] == list(range(4, 12))


def test_a_group_of_one_never_has_zero_variance() -> None:
    admit, dropped, _ = play(scheduler(group_size=1, refill=3), 1, lambda task, sample: 0.0, random.Random(0))
    assert list(admit.tasks) == [0, 1, 2, 3] and not dropped and admit.zero_variance == 0


def test_sums_in_another_order_count_as_equal_rewards() -> None:
    sums = (0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.1 + 0.3 + 0.2)
    assert len(set(sums)) == 2
    admit, _, _ = play(scheduler(), 1, lambda task, sample: sums[sample], random.Random(0))
    assert admit.zero_variance == 4


def test_a_group_with_too_few_rollouts_left_is_replaced() -> None:
    def fails(task: int, sample: int) -> float | None:
        return None if task == 1 and sample != 2 else float(sample)

    admit, dropped, _ = play(scheduler(min_group_size=2), 1, fails, random.Random(0))
    assert list(admit.tasks) == [0, 2, 3, 4] and dropped == [DropTask(1, "too few rollouts are left")]
    admit, dropped, _ = play(scheduler(), 1, fails, random.Random(0))
    assert admit.tasks[1] == (2,) and not dropped, "an advantage without a group baseline can train on it"


def test_a_failed_rollout_is_left_out_of_its_group() -> None:
    def fails_once(task: int, sample: int) -> float | None:
        return None if (task, sample) == (1, 2) else float(sample)

    admit, _, _ = play(scheduler(), 1, fails_once, random.Random(3))
    assert admit.tasks[1] == (0, 1) and admit.tasks[0] == (0, 1, 2)


def test_a_group_of_failed_rollouts_is_dropped_and_replaced_within_a_bound() -> None:
    admit, dropped, _ = play(scheduler(), 1, lambda task, sample: None if task < 2 else 1.0, random.Random(0))
    assert list(admit.tasks) == [2, 3, 4, 5] and {drop.task for drop in dropped} == {0, 1}
    admit, dropped, issued = play(scheduler(), 1, lambda task, sample: None, random.Random(0))
    assert not admit.tasks and len(dropped) == 8 and len(issued) == 24


@given(st.integers(0, 10_000))
def test_a_killed_run_resumes_where_it_was(seed: int) -> None:
    """Kill after any number of ended rollouts. The resumed run has the same admission."""
    rng = random.Random(seed)
    whole, _, _ = play(scheduler(refill=2), 1, mixed, random.Random(0))
    plan = scheduler(refill=2)
    running = [d for d in open_step(plan, 1) if isinstance(d, IssueRollout)]
    scored: dict[int, dict[int, float]] = {}
    for _ in range(rng.randrange(9)):
        rollout = running.pop(rng.randrange(len(running)))
        reward = mixed(rollout.task, rollout.sample)
        assert reward is not None
        scored.setdefault(rollout.task, {})[rollout.sample] = reward
        running += [
            d for d in plan.handle(RolloutFinished(rollout.task, rollout.sample, reward)) if isinstance(d, IssueRollout)
        ]
    resumed = scheduler(refill=2, first=plan.next_task)
    resumed.resume(
        [
            OpenGroup(task, scored.get(task, {}), [issue.sample for issue in running if issue.task == task])
            for task in range(plan.next_task)
        ]
    )
    assert not resumed.running and resumed.next_task == plan.next_task

    decisions = open_step(resumed, 1)
    assert sorted(decisions, key=repr) == sorted(running, key=repr)
    waiting: list[IssueRollout] = []
    while not any(isinstance(d, AdmitStep) for d in decisions):
        waiting += [d for d in decisions if isinstance(d, IssueRollout)]
        rollout = waiting.pop(rng.randrange(len(waiting)))
        decisions = resumed.handle(
            RolloutFinished(rollout.task, rollout.sample, mixed(rollout.task, rollout.sample) or 0.0)
        )
    admit = decisions[-1]
    assert isinstance(admit, AdmitStep) and admit.tasks == whole.tasks


def test_a_kill_gives_no_step_more_tasks() -> None:
    resumed = scheduler(first=6)
    resumed.resume([OpenGroup(0, {0: 1.0, 1: 0.0}, [2]), *(OpenGroup(task, dropped=True) for task in range(1, 6))])
    opened = open_step(resumed, 1)
    assert opened[0] == IssueRollout(0, 2, 0)
    assert {d.task for d in opened[1:] if isinstance(d, IssueRollout)} == {6, 7}, (
        "six of at most eight tasks were issued"
    )
    assert resumed.handle(RolloutFailed(0, 2)) == []
    for task in (6, 7):
        for sample in range(3):
            opened = resumed.handle(RolloutFinished(task, sample, float(sample)))
    admit = opened[-1]
    assert isinstance(admit, AdmitStep) and admit.tasks == {0: (0, 1), 6: (0, 1, 2), 7: (0, 1, 2)}


def test_steps_open_one_at_a_time() -> None:
    plan = scheduler()
    plan.handle(StepOpened(1))
    with pytest.raises(AssertionError, match="one at a time"):
        plan.handle(StepOpened(2))


# -- a greedy answer beside each group --------------------------------------------------------------------------------


@given(seed=st.integers(0, 1000), tasks=st.integers(1, 4))
def test_each_task_is_answered_greedily_once_and_that_is_never_admitted(seed: int, tasks: int) -> None:
    plan, rng = scheduler(greedy=True, tasks=tasks), random.Random(seed)
    for step in (1, 2):
        admit, dropped, issued = play(plan, step, lambda task, sample: float(sample), rng)
        assert not dropped and all(samples == (0, 1, 2) for samples in admit.tasks.values())
        every = [IssueRollout(task, sample, step - 1) for task in admit.tasks for sample in range(4)]
        assert sorted(issued, key=repr) == sorted(every, key=repr)


@given(st.integers(0, 1000))
def test_a_task_without_its_greedy_answer_is_dropped(seed: int) -> None:
    def no_greedy(task: int, sample: int) -> float | None:
        return None if (task, sample) == (1, 3) else float(sample)

    admit, dropped, _ = play(scheduler(greedy=True), 1, no_greedy, random.Random(seed))
    assert dropped == [DropTask(1, "the greedy answer failed")]
    assert list(admit.tasks) == [0, 2, 3, 4]


def test_a_group_with_only_a_scored_greedy_answer_has_failed() -> None:
    admit, dropped, _ = play(
        scheduler(greedy=True), 1, lambda task, sample: 1.0 if task or sample == 3 else None, random.Random(0)
    )
    assert dropped == [DropTask(0, "every rollout failed")] and list(admit.tasks) == [1, 2, 3, 4]


def test_a_group_with_the_rewards_of_its_greedy_answer_has_zero_variance() -> None:
    def reward(task: int, sample: int) -> float:
        return 1.0 if task == 0 or sample < 3 else 0.0

    admit, dropped, _ = play(scheduler(greedy=True, refill=2), 1, reward, random.Random(0))
    assert dropped == [DropTask(0, "every rollout earned the same")] and list(admit.tasks) == [1, 2, 3, 4]
    admit, _, _ = play(scheduler(greedy=True, group_size=1), 1, lambda task, sample: 1.0, random.Random(0))
    assert admit.zero_variance == 4, "a rollout with the reward of the greedy answer has no advantage"


def test_a_kill_loses_no_greedy_answer() -> None:
    resumed = scheduler(greedy=True, first=2)
    resumed.resume([OpenGroup(0, {0: 1.0, 1: 0.0, 3: 0.5}, [2]), OpenGroup(1, {0: 1.0, 1: 0.0, 2: 1.0}, [3])])
    assert open_step(resumed, 1)[:2] == [IssueRollout(0, 2, 0), IssueRollout(1, 3, 0)]
    resumed.handle(RolloutFinished(0, 2, 1.0))
    assert resumed.handle(RolloutFailed(1, 3))[0] == DropTask(1, "the greedy answer failed")
    lost = scheduler(greedy=True, first=1)
    lost.resume([OpenGroup(0, {0: 1.0, 1: 0.0, 2: 1.0})])
    assert open_step(lost, 1)[0] == DropTask(0, "the greedy answer failed"), "it had failed before the kill"


# -- ahead of the trainer ---------------------------------------------------------------------------------------------


def issued_tasks(decisions: list[Decision]) -> set[int]:
    """Return the tasks of issued rollouts."""
    return {decision.task for decision in decisions if isinstance(decision, IssueRollout)}


def end_group(plan: CollectionScheduler, task: int, reward: float | None = None) -> list[Decision]:
    """End all rollouts of a group, with different rewards or all with this one. A reward of -1 is a failure."""
    decisions: list[Decision] = []
    for sample in range(3):
        metric = float(sample) if reward is None else reward
        event = RolloutFailed(task, sample) if metric < 0 else RolloutFinished(task, sample, metric)
        decisions += plan.handle(event)
    return decisions


def test_groups_are_issued_as_far_ahead_as_the_bound_allows() -> None:
    plan = scheduler(max_staleness=2)
    first = plan.handle(VersionPublished(0, 0))
    assert issued_tasks(first) == set(range(12)), "three steps can use version 0 within the bound"
    assert {decision.floor for decision in first if isinstance(decision, IssueRollout)} == {0}
    assert plan.handle(StepOpened(1)) == [] and plan.waiting_for() == [(t, s) for t in range(4) for s in range(3)]
    for task in (5, 1, 2, 3):
        assert end_group(plan, task) == [], "group 0 comes first, even if it is slow"
    assert plan.waiting_for() == [(0, sample) for sample in range(3)]
    admit = end_group(plan, 0)[-1]
    assert isinstance(admit, AdmitStep) and list(admit.tasks) == [0, 1, 2, 3] and admit.end == 4
    assert plan.waiting_for() == [] and plan.running == 21
    assert issued_tasks(plan.handle(VersionPublished(1, 0))) == set(), "an engine still samples with version 0"
    assert issued_tasks(plan.handle(VersionPublished(1, 1))) == {12, 13, 14, 15}


def test_a_failed_group_is_replaced_at_once_ahead_of_its_step() -> None:
    plan = scheduler(max_staleness=1)
    plan.handle(VersionPublished(0, 0))
    drop, *more = end_group(plan, 2, -1.0)
    assert drop == DropTask(2, "every rollout failed") and issued_tasks(more) == {8}
    plan.handle(StepOpened(1))
    for task in (0, 1, 3):
        assert end_group(plan, task) == []
    admit = end_group(plan, 4)[-1]
    assert isinstance(admit, AdmitStep) and list(admit.tasks) == [0, 1, 3, 4] and admit.end == 5


def test_nothing_is_issued_that_no_step_trains_on() -> None:
    plan = scheduler(max_staleness=5, last_step=2)
    assert issued_tasks(plan.handle(VersionPublished(0, 0))) == set(range(8))
    plan.handle(StepOpened(1))
    for task in range(8):
        end_group(plan, task)
    assert plan.handle(VersionPublished(1, 1)) == [] and plan.running == 0
    assert isinstance(plan.handle(StepOpened(2))[-1], AdmitStep)


def test_rollouts_interrupted_by_a_kill_wait_until_the_weights_are_new_enough() -> None:
    plan = scheduler(max_staleness=1, first=8, step=3, floor=1)
    plan.resume(
        [OpenGroup(task, {0: 1.0}, [1, 2], oldest=2) for task in range(4)]
        + [OpenGroup(task, {}, [0, 1, 2]) for task in range(4, 8)]
    )
    assert plan.handle(VersionPublished(1, 1)) == [], "version 1 is too old for the next step, 4"
    assert issued_tasks(plan.handle(VersionPublished(2, 2))) == {0, 1, 2, 3}
    assert issued_tasks(plan.handle(VersionPublished(3, 3))) == {4, 5, 6, 7}
    assert issued_tasks(plan.handle(StepOpened(4))) == set()


def test_a_group_that_no_step_can_train_on_within_a_lower_bound_is_dropped() -> None:
    plan = scheduler(max_staleness=1, first=8, step=3, floor=3)
    plan.resume([OpenGroup(task, dict.fromkeys(range(3), 1.0), oldest=task // 4 + 1) for task in range(8)])
    drops = [decision for decision in plan.handle(VersionPublished(3, 3)) if isinstance(decision, DropTask)]
    assert [drop.task for drop in drops] == [0, 1, 2, 3], "step 4 would be two versions later"
    admit = plan.handle(StepOpened(4))[-1]
    assert isinstance(admit, AdmitStep) and list(admit.tasks) == [4, 5, 6, 7]


def test_a_published_version_never_falls() -> None:
    plan = scheduler()
    plan.handle(VersionPublished(2, 1))
    with pytest.raises(AssertionError, match="stays published"):
        plan.handle(VersionPublished(2, 0))
