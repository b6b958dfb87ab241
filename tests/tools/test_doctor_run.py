"""`etude doctor RUN` reads a run's files, prints its findings with a page of the viewer, and tells programs."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from etude.cli import main
from etude.integrity import write_text
from etude.observe import JsonlSink, RunInfo
from etude.recipes.run.resume.session_log import record_session
from etude.records import Outcome
from etude.store import open_store
from etude.store.journal.events import AttemptEnded, AttemptRewarded, AttemptStarted, RolloutQueued, TaskIssued
from etude.tools.doctor.run import examine
from etude.tools.metric_curves import read_curves
from etude.view.catalog import RunCatalog
from etude.view.server import PAGES
from tests.view.made import Viewer, write_run

Captured = pytest.CaptureFixture[str]


def written(directory: Path, steps: int = 8, **values: Any) -> Path:
    """Write the metrics and options of a run."""
    sink = JsonlSink()
    sink.open(RunInfo("run", directory))
    for step in range(1, steps + 1):
        sink.log(step, {"reward": step / steps, **values})
    sink.close()
    write_text(directory / "run.yaml", "recipe: train\ness_floor: 0.3\n")
    return directory


def test_a_finding_has_its_evidence_its_remedy_and_its_page(tmp_path: Path, capsys: Captured) -> None:
    run = written(tmp_path / "my run", 8, **{"mismatch/rollout_effective_sample_size": 0.2})
    assert main(["doctor", str(run)]) == 1
    printed = capsys.readouterr().out
    assert "sample size low: " in printed and "`ess_floor=0.3`" in printed and "`correction.weight=truncate`" in printed
    assert "steps 1 to 8: mismatch/rollout_effective_sample_size 0.2000" in printed

    assert main(["doctor", str(run), "--json"]) == 1
    examined = json.loads(capsys.readouterr().out)
    (finding,) = examined["findings"]
    page = urlsplit(finding["page"])
    query = parse_qs(page.query)
    assert page.path in PAGES and query["metrics"] == [*finding["numbers"]]
    assert query["run"] == [*RunCatalog(run).directories()]
    assert (examined["healthy"], examined["steps"], finding["first"], finding["last"]) == (False, 8, 1, 8)


def test_a_run_without_a_finding_is_healthy(tmp_path: Path, capsys: Captured) -> None:
    run = written(tmp_path / "run", truncated=0.0)
    assert main(["doctor", str(run)]) == 0
    assert "No finding" in capsys.readouterr().out
    assert main(["doctor", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is True


def test_a_run_that_an_error_ended_is_not_healthy(tmp_path: Path, capsys: Captured) -> None:
    run = written(tmp_path / "run", truncated=0.0)
    sessions = [
        {"at": 1.0, "began": 0, "process": 1, "host": "here", "preset": "", "device": "", "versions": {}},
        {"at": 2.0, "ended": 8, "how": "failed", "message": "The reward raised 64 times in a row."},
    ]
    (run / "sessions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sessions))
    assert main(["doctor", str(run)]) == 1
    assert "The run ended with an error: The reward raised 64 times in a row." in capsys.readouterr().out
    assert main(["doctor", str(run), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["healthy"] is False


def test_tasks_that_never_earn_are_named(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    with closing(open_store(run / "journal.sqlite")) as store:
        for task in range(12):
            store.append([TaskIssued(task, task % 6, "", {})])
            for rollout in range(8 * task, 8 * task + 8):
                earned = float(task % 6 > 2 and rollout % 2)
                store.append([RolloutQueued(rollout, task, rollout % 8), AttemptStarted(rollout, 0)])
                store.append([AttemptRewarded(rollout, 0, earned, {}, False)])
                store.append([AttemptEnded(rollout, 0, Outcome.SUCCEEDED, "", False)])
    (finding,) = examine(run).findings
    assert finding.rule == "tasks never earn"
    assert finding.what == (
        "3 of 6 tasks that came 2 times or more have never earned more than 0, in 48 answers: task 6 (row 0), task 7 "
        "(row 1), task 8 (row 2)."
    )


def test_a_damaged_run_is_examined_as_far_as_it_is_whole(tmp_path: Path, capsys: Captured) -> None:
    run = written(tmp_path / "run", truncated=0.9)
    (run / "run.yaml").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write("no step\n")
    assert main(["doctor", str(run), "--json"]) == 1
    examined = json.loads(capsys.readouterr().out)
    assert [finding["rule"] for finding in examined["findings"]] == ["answers cut off"]
    assert len(examined["problems"]) == 2 and "1 line" in examined["problems"][0]


def test_steps_that_the_metrics_lack_are_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    assert examine(run).problems == [], "the last step may be under way"
    with record_session(run, lambda: 4, lambda: True):
        pass
    assert examine(run).problems == ["metrics.jsonl ends at step 3; journal.sqlite has 4 steps."]

    (run / "sessions.jsonl").unlink()
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    missing = "metrics.jsonl ends at step 2; journal.sqlite has 4 steps."
    assert examine(run).problems == [missing] and read_curves(run).problem == missing
    assert Viewer(tmp_path).get("run", run="run")["problems"] == [missing]

    (run / "journal.sqlite").write_bytes(b"nothing")
    assert "is not a database" in examine(run).problems[0]
    (run / "journal.sqlite").unlink()
    assert examine(run).problems == ["journal.sqlite is missing, which held the rollouts of the run."]
