"""The groups of a step if quick groups are trained before slow ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.recipes.collect.scheduler import CollectionScheduler, Decision, SchedulerEvent
from etude.recipes.collect.step_windows import GroupStatus, TaskGroup, choose_early
from tests.recipes.collect.scheduler_faults import Case, FaultyRun

SEEDS = st.integers(0, 10**9)


def group(task: int, status: GroupStatus, decided: int = 0, floor: int = 0) -> TaskGroup:
    """Return a group of the line. Its floor is used as its deadline."""
    return TaskGroup(task, task, floor=floor, status=status, decided=decided)


def deadline(group: TaskGroup) -> float:
    """Return the last step that may train on a group."""
    assert group.floor is not None
    return group.floor


def latest_steps(line: Sequence[TaskGroup], size: int, longest: int, step: int) -> dict[int, int]:
    """Return the step of each group if the steps take the windows of the line in order, from this step on."""
    steps, length, candidates = {}, 0, 0
    for each in line:
        steps[each.task] = step
        length, candidates = length + 1, candidates + each.status.is_candidate
        if candidates == size or length == longest:
            step, length, candidates = step + 1, 0, 0
    return steps


def in_time(line: Sequence[TaskGroup], chosen: Sequence[TaskGroup], size: int, longest: int, step: int) -> bool:
    """Return True if the next steps can train on all remaining candidates, each before its deadline."""
    end = max(each.task for each in chosen)
    left = [each for each in line if each not in chosen and (each.status.is_candidate or each.task > end)]
    steps = latest_steps(left, size, longest, step + 1)
    return all(steps[each.task] <= deadline(each) for each in left if each.status.is_candidate)


def choose_by_definition(line: Sequence[TaskGroup], size: int, longest: int, step: int) -> list[TaskGroup] | None:
    """Return the choice with the fewest oldest groups that leaves the others in time, or None."""
    candidates = [each for each in line if each.status.is_candidate]
    quick = sorted((each for each in candidates if each.status is GroupStatus.USABLE), key=lambda each: each.decided)
    for number in range(size + 1):
        oldest = candidates[:number]
        chosen = [*oldest, *[each for each in quick if each not in oldest][: size - number]]
        ready = len(chosen) == size and all(each.status is GroupStatus.USABLE for each in chosen)
        if ready and in_time(line, chosen, size, longest, step):
            return chosen
    return None


def random_line(seed: int, size: int, failing: float) -> list[TaskGroup]:
    """Return a random line whose deadlines never fall, like those of a run."""
    rng = random.Random(seed)
    order = random.Random(seed + 1).sample(range(1, 100), 40)
    line, last = [], 1
    for task in range(rng.randint(size, 5 * size)):
        last += rng.random() < 1 / size
        kind = random.Random(seed + task).choice((GroupStatus.OPEN, GroupStatus.USABLE, GroupStatus.USABLE))
        status = GroupStatus.FAILED if rng.random() < failing else kind
        line.append(group(task, status, order[task], last + rng.randint(0, 1)))
    deadlines = sorted(each.floor or 0 for each in line)
    for each, floor in zip(line, deadlines, strict=True):
        each.floor = floor
    return line


@given(seed=SEEDS, size=st.integers(1, 6), failing=st.sampled_from([0.0, 0.3]), factor=st.integers(1, 3))
@settings(max_examples=300)
def test_the_choice_is_that_of_the_definition(seed: int, size: int, failing: float, factor: int) -> None:
    line = random_line(seed, size, failing)
    chosen = choose_early(line, deadline, size, size * factor, 1)
    assert sorted(each.task for each in chosen) == sorted(
        each.task for each in choose_by_definition(line, size, size * factor, 1) or []
    )


def test_quick_groups_are_trained_before_slow_ones_that_have_time() -> None:
    line = [
        group(0, GroupStatus.OPEN, floor=2),
        group(1, GroupStatus.USABLE, 3, floor=3),
        group(2, GroupStatus.FAILED),
        group(3, GroupStatus.USABLE, 1, floor=3),
        group(4, GroupStatus.USABLE, 2, floor=3),
    ]
    assert [each.task for each in choose_early(line, deadline, 2, 4, 1)] == [3, 4]
    assert choose_early(line, deadline, 2, 4, 2) == [], "the first one must be trained at step 2"
    line[0].status = GroupStatus.USABLE
    assert [each.task for each in choose_early(line, deadline, 2, 4, 2)] == [0, 3]


class LooksEachTime(CollectionScheduler):
    """A scheduler that computes the choice at every event, not only when the awaited group ends."""

    def handle(self, event: SchedulerEvent) -> list[Decision]:
        self._awaited = None
        return super().handle(event)


@given(SEEDS)
@settings(max_examples=40)
def test_a_scheduler_that_waits_for_one_group_decides_as_one_that_looks_each_time(seed: int) -> None:
    case = Case.drawn(seed, max_staleness=2 + seed % 4, failing=0.4, killing=0.0, steps=12, window=None)
    case = replace(case, window=case.tasks + 1 + seed % 12)
    runs = [FaultyRun(case, kind).run() for kind in (CollectionScheduler, LooksEachTime)]
    assert runs[0].journal.admitted == runs[1].journal.admitted
