"""Runs that train on the groups that end first: what a step leaves behind, and how a resumed run knows it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from etude.errors import CollectionError
from etude.recipes.collect.resume import read_remainder
from etude.records import Outcome, Task
from etude.store import (
    AttemptEnded,
    AttemptRewarded,
    AttemptStarted,
    Event,
    Journal,
    RolloutQueued,
    RolloutsAdmitted,
    TaskDropped,
    TaskIssued,
    open_store,
)
from tests.recipes.collect.test_sources import BEGINNING, even, sourced
from tests.recipes.test_stale_rollouts import GIVEN, STEPS, Versioned, run_steps


def admissions(store: Journal) -> list[RolloutsAdmitted]:
    """The admissions of a journal."""
    return [event for _, event in store.read(kinds=(RolloutsAdmitted,)) if isinstance(event, RolloutsAdmitted)]


def succeeded(id: int) -> list[Event]:
    """The events of a rollout with a score."""
    return [AttemptStarted(id, 0), AttemptRewarded(id, 0, 1.0), AttemptEnded(id, 0, Outcome.SUCCEEDED)]


def test_a_slow_group_is_left_to_a_later_step_and_a_resumed_run_has_the_same_steps() -> None:
    engine = Versioned(lambda n: 0.2 if n < 2 else 0.0)
    options: dict[str, Any] = GIVEN | {"max_staleness": 3, "order": "windowed"}
    with closing(open_store()) as store:
        with sourced(engine, store, even, **options) as source:
            source.published(0)
            assert source.next(1).metrics.reduce()["skipped_tasks"] == 1
            assert max(run_steps(source, engine, 2, STEPS)) <= 3
        steps = admissions(store)
        assert steps[0].rollouts == (2, 3, 4, 5) and (steps[0].end, steps[0].skipped) == (3, (0,))
        tasks = [task for step in steps for task in dict.fromkeys(id // 2 for id in step.rollouts)]
        assert sorted(tasks) == list(range(2 * STEPS)), "and none is left out"
        trained = next(step.step for step in steps if 0 in step.rollouts)
        assert 1 < trained <= 4 and all(0 not in step.skipped for step in steps[trained - 1 :])
        with sourced(engine, store, even, **options) as source:
            replayed = [source.next(step) for step in range(1, STEPS + 1)]
        assert [tuple(each.id for each in groups.rollouts) for groups in replayed] == [step.rollouts for step in steps]


def test_a_resumed_run_counts_dropped_groups_that_no_step_had_looked_at() -> None:
    """A group that was left behind and failed then still counts in the length of a later window."""
    issued = [TaskIssued(task, task, "s", {}) for task in range(7)]
    queued = [RolloutQueued(task, task, 0) for task in (1, 3, 4, 6)]
    scored = [event for id in (1, 3) for event in succeeded(id)]
    admitted = RolloutsAdmitted(1, (1, 3), end=4, skipped=(0,), version=0)
    dropped = [TaskDropped(2, 1, "every rollout earned the same"), TaskDropped(5, 1, "every rollout failed")]
    later = TaskDropped(0, 2, "every rollout failed")
    with closing(open_store()) as store:
        store.append([*issued, *queued, *scored, *dropped, admitted, later])
        remainder = read_remainder(store, 0, BEGINNING)
        assert (remainder.end, remainder.skipped) == (4, (0,))
        assert [task.id for task in remainder.dropped_ahead] == [5, 0], "and not task 2, which step 1 dropped"
        assert [task.id for task in remainder.open_tasks] == [4, 6]


def test_a_step_counts_groups_that_failed_after_an_earlier_step_left_them_behind() -> None:
    """Two of them and two that fail now are all that the step may look at."""

    def judged(task: Task, answer: str) -> float:
        if task.ordinal < 6:
            raise ValueError("a task that cannot be judged")
        return even(task, answer)

    scored = [event for id in (1, 3) for event in (RolloutQueued(id, id, 0), *succeeded(id))]
    engine, options = Versioned(), GIVEN | {"group_size": 1, "max_staleness": 2}
    with closing(open_store()) as store:
        store.append([*(TaskIssued(task, task, "s", {}) for task in range(4)), *scored])
        store.append([RolloutsAdmitted(1, (1, 3), end=4, skipped=(0, 2), version=0)])
        store.append([TaskDropped(task, 2, "every rollout failed") for task in (0, 2)])
        with (
            sourced(engine, store, judged, step=1, mark=store.flush(), **options) as source,
            pytest.raises(CollectionError),
        ):
            run_steps(source, engine, 2, 2)
