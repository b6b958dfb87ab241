"""The lanes of a run: the trainer's phases from its metrics, the running attempts from the journal."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from etude.records import Outcome
from etude.store import AttemptEnded, AttemptStarted, Event, RolloutQueued, RolloutsAdmitted, TaskIssued, open_store
from tests.view.made import Viewer


def timed_run(directory: Path, steps: int) -> None:
    """Write a run whose step k lasts from second 10 k to 10 (k + 1): it collects for 6 s, and updates for 2 s.

    Two attempts run while a step collects: one for all of that time, one for its first half.
    """
    directory.mkdir()
    with closing(open_store(directory / "journal.sqlite")) as store, (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            began, ids = 10.0 * step, (2 * step, 2 * step + 1)
            events: list[Event] = [TaskIssued(step, 0, "", {}), *(RolloutQueued(id, step, id % 2) for id in ids)]
            events += [AttemptStarted(id, 0, at=began) for id in ids]
            ends = zip(ids, (6.0, 3.0), strict=True)
            events += [AttemptEnded(id, 0, Outcome.SUCCEEDED, at=began + seconds) for id, seconds in ends]
            store.append([*events, RolloutsAdmitted(step, ids, end=0, version=0)])
            times = {"time/step": 10.0, "time/update": 2.0, "time/collect": 6.0}
            file.write(json.dumps({"step": step, "time": began + 10.0, **times}) + "\n")


@pytest.fixture
def viewer(tmp_path: Path) -> Viewer:
    timed_run(tmp_path / "run", 12)
    return Viewer(tmp_path)


def test_phases_follow_each_other_within_their_step(viewer: Viewer) -> None:
    lanes = viewer.get("lanes", run="run", first=2, last=3)
    assert (lanes["began"], lanes["seconds"]) == (20.0, 20.0)
    trainer = lanes["trainer"]
    spans = list(zip(trainer["step"], trainer["phase"], trainer["begin"], trainer["end"], strict=True))
    assert spans == [
        *((2, "collect", 0.0, 6.0), (2, "update", 6.0, 8.0)),
        *((3, "collect", 10.0, 16.0), (3, "update", 16.0, 18.0)),
    ]


def test_running_attempts_are_counted_over_the_same_time(viewer: Viewer) -> None:
    lanes = viewer.get("lanes", run="run", first=2, last=3)
    running = dict(zip(lanes["attempts"]["time"], lanes["attempts"]["running"], strict=True))
    for second, expected in ((1.0, 2.0), (4.0, 1.0), (7.0, 0.0), (11.0, 2.0), (14.0, 1.0), (19.0, 0.0)):
        nearest = min(running, key=lambda time: abs(time - second))
        assert running[nearest] == pytest.approx(expected), second
    assert lanes["idle"] == pytest.approx(0.4)


def test_the_evaluation_after_the_last_shown_step_is_among_its_attempts(tmp_path: Path) -> None:
    timed_run(tmp_path / "run", 1)
    with closing(open_store(tmp_path / "run" / "journal.sqlite")) as store:
        store.append([TaskIssued(99, 0, "", {}), RolloutQueued(99, 99, 0, "val"), AttemptStarted(99, 0, at=18.0)])
        store.append([AttemptEnded(99, 0, Outcome.SUCCEEDED, at=20.0), RolloutsAdmitted(2, (), end=0, version=1)])
    lanes = Viewer(tmp_path).get("lanes", run="run", last=1)
    assert lanes["attempts"]["running"][-1] == pytest.approx(1.0) and lanes["idle"] == pytest.approx(0.2)


def test_the_last_steps_are_shown_unless_others_are_named_and_a_range_is_bounded(viewer: Viewer) -> None:
    def steps(**given: int) -> list[int]:
        return sorted(set(viewer.get("lanes", run="run", **given)["trainer"]["step"]))

    assert steps() == [10, 11, 12] and steps(last=5) == [3, 4, 5] and steps(first=1, last=12) == [*range(5, 13)]
    assert viewer.ask("api/lanes?run=run&last=99&first=50").status_code == 404


def test_an_attempt_that_has_not_ended_still_runs(viewer: Viewer, tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "run" / "journal.sqlite")) as store:
        store.append([TaskIssued(99, 0, "", {}), RolloutQueued(99, 99, 0), AttemptStarted(99, 0, at=125.0)])
    lanes = viewer.get("lanes", run="run", first=12)
    assert lanes["attempts"]["running"][-1] == pytest.approx(1.0) and lanes["idle"] == pytest.approx(0.0)
