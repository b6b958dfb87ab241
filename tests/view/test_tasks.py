"""A task over a run: the draws of its row, their rewards, and the answers at two of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.errors import StoreError
from etude.records import Completion, Turn
from etude.store import RolloutQueued, RolloutsAdmitted, TaskDropped, TaskIssued, open_store
from etude.view.catalog import RunCatalog
from etude.view.queries import task as tasks
from etude.view.queries.task import read_task
from tests.view.made import Viewer, rollout_events, turn, write_run

SCORED = 2**40


def answer(*ids: int) -> Turn:
    """Return a turn of these tokens."""
    tokens = np.array(ids, np.int32)
    completion = Completion(tokens, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop", str(ids))
    return Turn(np.arange(2, dtype=np.int32), completion, 0)


def draw(directory: Path, task: int, step: int, *answers: Turn) -> None:
    """Draw row 30 again: a task with these answers, the last one right."""
    with closing(open_store(directory / "journal.sqlite")) as store:
        rollouts = [2 * task + sample for sample in range(len(answers))]
        store.append([TaskIssued(task, 30, "sums", {"prompt": "What is 3 + 1?"})])
        for sample, (rollout, tried) in enumerate(zip(rollouts, answers, strict=True)):
            store.append([RolloutQueued(rollout, task, sample)])
            store.append(rollout_events(rollout, float(sample == len(answers) - 1), tried))
        store.append([RolloutsAdmitted(step, tuple(rollouts), task + 1, step - 1)])


@pytest.fixture
def viewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Viewer:
    """A run of two steps, whose row 30 is task 3 and, in steps 3 and 4, tasks 10 and 11."""
    monkeypatch.setattr(tasks, "INDEX_S", 60.0)  # a busy machine needs more than a tenth of a second
    directory = write_run(tmp_path / "run", steps=2)
    draw(directory, 10, 3, answer(0, 1, 9), answer(0, 1, 2, 7))
    return Viewer(tmp_path)


def test_the_draws_of_a_row_are_found_and_its_answers_compared(viewer: Viewer, tmp_path: Path) -> None:
    page = viewer.get("task", run="run", task=3)
    assert (page["row"], page["source"], page["count"], page["complete"]) == (30, "sums", 2, True)
    draws = page["draws"]
    assert draws["step"] == [1, 3] and draws["task"] == [3, 10] and draws["reward"] == [0.5, 0.5]
    assert draws["tokens"] == [7, 7] and draws["high"] == [1.0, 1.0]
    assert [draws[f"{name}_tokens"] for name in ("mean", "fewest", "most")] == [[3.5, 3.5], [3, 3], [4, 4]]
    assert [page[side]["task"] for side in ("first", "second")] == [3, 10]
    assert [row["reward"] for row in page["second"]["rollouts"]] == [1.0, 0.0]
    assert page["common"] == [3, 2], "0 1 2 3, the best of the first, against 0 1 2 7 and 0 1 9"
    draw(tmp_path / "run", 11, 4, answer(5), answer(0))
    with closing(open_store(tmp_path / "run" / "journal.sqlite")) as store:
        store.append([TaskIssued(12, 30, "sums", {"prompt": "What is 3 + 1?"})])
    page = viewer.get("task", run="run", task=10)
    assert page["draws"]["task"] == [3, 10, 11, 12] and page["second"]["task"] == 11
    page = viewer.get("task", run="run", task=10, a=11, b=10)
    assert [page["first"]["task"], page["second"]["task"]] == [11, 10] and page["common"] == [1, 1]
    assert viewer.ask("api/task?run=run&task=3&as=csv").text.startswith("step,task,rollouts")


def test_a_draw_of_another_row_and_a_task_that_scores_the_model_are_no_draws(viewer: Viewer, tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "run" / "journal.sqlite")) as store:
        store.append([TaskIssued(SCORED, 30, "sums", {"prompt": "?"}, "val"), RolloutQueued(SCORED, SCORED, 0, "val")])
        store.append([*rollout_events(SCORED, 1.0, turn(2, 2)), TaskDropped(SCORED, 3, "it was asked to score")])
    assert viewer.get("task", run="run", task=3)["draws"]["task"] == [3, 10]
    assert viewer.get("task", run="run", task=SCORED)["draws"]["task"] == [SCORED]
    reply = viewer.ask("api/task?run=run&task=3&a=4")
    assert reply.status_code == 422 and "Task 4 is not a draw of row 30" in reply.json()["error"]
    assert viewer.ask("api/task?run=run&task=77").status_code == 404


def test_a_damaged_task_is_no_draw_and_the_others_are_shown(viewer: Viewer, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "run" / "journal.sqlite")) as database, database:
        database.execute("UPDATE events SET digest = digest + 1 WHERE body LIKE '{\"task\":10,%'")
    draw(tmp_path / "run", 11, 4, answer(1))
    assert viewer.get("task", run="run", task=3)["draws"]["task"] == [3, 11]


def test_a_journal_that_cannot_be_read_for_a_while_loses_no_draw(
    viewer: Viewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Iterator[Any]:
        raise StoreError("another process has held it")

    with closing(RunCatalog(tmp_path)) as catalog, catalog.reader("run") as reader:
        with monkeypatch.context() as patch, pytest.raises(StoreError):
            patch.setattr(reader.journal, "read", fail)
            reader.task_index.refresh(60.0)
        assert read_task(reader, 3).draws.columns["task"] == [3, 10]


def test_a_request_reads_tasks_for_a_bounded_time_and_few_of_many_draws_are_shown(
    viewer: Viewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in range(11, 17):
        draw(tmp_path / "run", task, task - 7, answer(1), answer(2))
    monkeypatch.setattr(tasks, "MOST_DRAWS", 3)
    monkeypatch.setattr(tasks, "INDEX_S", 0.0)
    with closing(RunCatalog(tmp_path)) as catalog, catalog.reader("run") as reader:
        page = read_task(reader, 3)
        assert (page.complete, page.count) == (False, 1)
        for _ in range(20):
            page = read_task(reader, 3)
        assert page.complete and page.count == 8 and page.draws.columns["task"] == [3, 12, 16]
