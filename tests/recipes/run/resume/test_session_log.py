"""The sessions of a run: their starts, ends and errors, also those of a process that was killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.errors import EngineError
from etude.recipes.run.resume.session_log import SESSIONS, read_sessions, record_session


def one_session(directory: Path, steps: list[int], error: BaseException | None = None, total: int = 4) -> None:
    """Record a session that finishes these steps, and ends with this error."""
    with record_session(directory, lambda: steps[0], lambda: steps[0] >= total):
        steps[0] = steps.pop()
        if error is not None:
            raise error


def test_each_end_is_recorded_with_its_step_and_its_error(tmp_path: Path) -> None:
    for steps, error in (([0, 2], KeyboardInterrupt()), ([2, 3], EngineError("no block")), ([3, 4], None)):
        if error is None:
            one_session(tmp_path, steps)
        else:
            with pytest.raises(type(error)):
                one_session(tmp_path, steps, error)
    stopped, failed, done = read_sessions(tmp_path)
    assert (stopped.first_step, stopped.last_step, stopped.how) == (0, 2, "stopped")
    assert (failed.first_step, failed.last_step, failed.how, failed.message) == (2, 3, "failed", "no block")
    assert (done.first_step, done.last_step, done.how, done.message) == (3, 4, "done", "")
    assert done.ended_at is not None and done.ended_at >= done.began_at > 1e9


def test_a_session_that_finished_its_block_before_the_last_step_was_stopped(tmp_path: Path) -> None:
    one_session(tmp_path, [0, 2])
    assert [session.how for session in read_sessions(tmp_path)] == ["stopped"]


def test_a_killed_session_has_no_end_even_if_another_follows(tmp_path: Path) -> None:
    one_session(tmp_path, [0, 4])
    lines = (tmp_path / SESSIONS).read_text().splitlines()
    start = {"at": 1, "began": 4, "process": 1, "host": "", "preset": "", "device": "", "versions": []}
    damaged = ['{"at": 1, "bega', json.dumps(start)]
    (tmp_path / SESSIONS).write_text("\n".join([lines[0], lines[0], lines[1], *damaged]))
    killed, done = read_sessions(tmp_path)
    assert (killed.how, killed.last_step, done.how) == (None, None, "done")


def test_a_bug_is_named_by_its_type_and_a_full_disk_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError):
        one_session(tmp_path, [0, 1], ZeroDivisionError("by zero"))
    assert read_sessions(tmp_path)[0].message == "ZeroDivisionError: by zero"
    finished: list[int] = []
    run: Callable[[], int] = lambda: 1  # noqa: E731
    with record_session(tmp_path / "gone", run, lambda: True):
        finished.append(1)
    assert finished and "could not be recorded" in caplog.text
