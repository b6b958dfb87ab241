"""The status of a run, and the marks of its sessions: one that lives, ended, was killed, or is on another machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.recipes.run.resume.session_log import SESSIONS, record_session
from tests.view.made import Viewer, write_metrics


def sessions(directory: Path, *lines: dict[str, object]) -> None:
    """Write these lines of sessions; a start without a host is of this machine, and of no preset."""
    mine: dict[str, object] = {"host": socket.gethostname(), "process": os.getpid(), "at": time.time()}
    mine |= {"preset": "", "device": "", "versions": {}}
    directory.mkdir(exist_ok=True)
    with (directory / SESSIONS).open("a") as file:
        for line in lines:
            file.write(json.dumps({**mine, **line}) + "\n")


def status(directory: Path) -> str:
    (found,) = Viewer(directory.parent).get("runs")["status"]
    return str(found)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_metrics(tmp_path / "runs" / "mine", 4, save_seconds=1.0)
    return tmp_path / "runs" / "mine"


def test_a_run_is_running_while_its_process_lives(run: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        sessions(run, {"began": 0, "process": process.pid})
        assert status(run) == "running"
        process.kill()
    assert status(run) == "killed"


def test_another_process_with_the_number_of_a_killed_one_is_not_the_run(run: Path) -> None:
    sessions(run, {"began": 0, "at": 1000.0})
    assert status(run) == "killed"


@pytest.mark.parametrize(("age", "expected"), [(0, "running"), (10_000, "silent")])
def test_a_run_of_another_machine_is_judged_by_its_last_write(run: Path, age: float, expected: str) -> None:
    sessions(run, {"began": 0, "host": "elsewhere"})
    written = time.time() - age
    for file in run.iterdir():
        os.utime(file, (written, written))
    assert status(run) == expected


def test_a_reader_of_the_journal_writes_nothing_to_a_run(run: Path) -> None:
    sessions(run, {"began": 0, "host": "elsewhere", "at": 1000.0})
    for file in run.iterdir():
        os.utime(file, (1000.0, 1000.0))
    (run / "journal.sqlite-wal").touch()
    assert status(run) == "silent"
    (run / "journal.sqlite-wal").write_text("events")
    assert status(run) == "running"
    sessions(run, {"ended": 4, "how": "failed", "message": "", "at": 1001.0})
    assert Viewer(run.parent).get("runs")["written_at"] == [1001.0]


def test_a_failed_run_shows_its_error_and_its_marks(run: Path) -> None:
    first, second = (json.loads(line)["time"] for line in (run / "metrics.jsonl").read_text().splitlines()[2:4])
    sessions(run, {"began": 0, "at": first - 9, "process": 2**22 + 1}, {"began": 2, "at": (first + second) / 2})
    sessions(run, {"ended": 3, "how": "stopped", "message": ""})
    with pytest.raises(RuntimeError), record_session(run, lambda: 4, lambda: False):
        raise RuntimeError("no memory")
    runs = Viewer(run.parent).get("runs")
    assert runs["status"] == ["failed"] and runs["message"] == ["RuntimeError: no memory"]
    marks = [(mark["step"], mark["kind"]) for mark in Viewer(run.parent).get("run", run="mine")["marks"]]
    assert [mark for mark in marks if mark[1] != "checkpoint"] == [
        (2, "resumed"),
        (3, "killed"),
        (3, "stopped"),
        (4, "evaluation"),
        (4, "resumed"),
        (4, "failed"),
    ]
    assert [step for step, kind in marks if kind == "checkpoint"] == [0, 1, 2, 3]
