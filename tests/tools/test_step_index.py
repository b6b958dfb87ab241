"""The steps of a journal: read on as it grows, each with its own dropped tasks."""

from __future__ import annotations

from typing import Any

from etude.store import AdvantagesEstimated, MemoryJournal, RolloutsAdmitted, TaskDropped
from etude.tools.step_index import StepIndex
from tests.store.made import group, tried


def test_each_step_has_its_rollouts_and_its_dropped_tasks() -> None:
    store = MemoryJournal()
    index = StepIndex(store)
    assert index.steps == [] and index.dropped(1) == []
    for task in range(6):
        store.append([*group(task), *tried(2 * task), *tried(2 * task + 1)])
    store.append([TaskDropped(0, 1, "flat"), RolloutsAdmitted(1, (2, 3), 2, 0)])
    index.refresh()
    assert index.steps == [1] and index.dropped(1) == [0]
    store.append([TaskDropped(2, 2, "failed")])
    index.refresh()
    assert index.steps == [1, 2] and index.dropped(2) == [2] and index.get(2) is None
    store.append([TaskDropped(3, 2, "flat"), RolloutsAdmitted(2, (8,), 5, 1), TaskDropped(5, 3, "failed")])
    index.refresh()
    assert index.steps == [1, 2, 3] and [index.dropped(step) for step in (1, 2, 3)] == [[0], [2, 3], [5]]
    admitted = index.get(2)
    assert admitted is not None and (admitted.rollouts.tolist(), admitted.version) == ([8], 1)


def test_the_advantages_of_a_step_are_found_also_after_a_resume() -> None:
    store = MemoryJournal()
    store.append([*group(0), *tried(0), *tried(1), RolloutsAdmitted(1, (0, 1), 1, 0)])
    index = StepIndex(store)
    assert index.advantages(1) == {} == index.advantages(2)
    store.append([AdvantagesEstimated(1, (0, 1), (0.5, -1 / 3))])
    store.append([*group(1), *tried(2), *tried(3), RolloutsAdmitted(2, (2, 3), 2, 1)])
    index.refresh()
    assert index.advantages(1) == {0: 0.5, 1: -0.333333} and index.advantages(2) == {}
    store.append([AdvantagesEstimated(1, (0, 1), (0.5, -1 / 3)), AdvantagesEstimated(2, (2, 3), (1, -1))])
    index.refresh()
    assert index.advantages(2) == {2: 1.0, 3: -1.0}, "the replay of step 1 stands before"


def test_a_refresh_reads_only_what_is_new() -> None:
    store = MemoryJournal()
    for task in range(3):
        store.append([*group(task), *tried(2 * task), *tried(2 * task + 1)])
        store.append([RolloutsAdmitted(task + 1, (2 * task, 2 * task + 1), end=0, version=0)])
    index = StepIndex(store)
    read = list[Any]()
    records = store._records

    def noted(*given: Any) -> Any:
        read.append(given)
        return records(*given)

    store._records = noted  # type: ignore[assignment,method-assign]
    index.refresh()
    assert not read
    store.append([*group(7), *tried(14), *tried(15), RolloutsAdmitted(4, (14, 15), end=0, version=0)])
    index.refresh()
    assert len(read) == 1 and [step.step for step in index.admitted] == [1, 2, 3, 4]
