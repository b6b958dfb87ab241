"""The worst new finding stands under the line of a step: when it begins, and when it gets worse."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from etude.observe import ConsoleSink, JsonlSink, RunInfo, make_console
from etude.recipes import diagnosis
from etude.recipes.diagnosis.step_findings import StepFindings

TOO_LONG, FAILING = {"truncated": 0.5}, {"failed_share": 0.4}


def printed(steps: list[dict[str, float]], directory: Path) -> list[str]:
    """Return the lines of the console, without the first."""
    text = io.StringIO()
    sink = ConsoleSink(make_console("plain", text), ["reward"], notes=StepFindings())
    sink.open(RunInfo("run", directory, len(steps)))
    for number, step in enumerate(steps, start=1):
        sink.log(number, {"reward": 0.5} | step)
    sink.close()
    return text.getvalue().splitlines()[1:]


def test_a_finding_stands_once_under_the_step_where_it_begins_and_where_it_gets_worse(tmp_path: Path) -> None:
    lines = printed([TOO_LONG] * 12 + [{"truncated": 1.0}] * 10, tmp_path)
    notes = {place: line for place, line in enumerate(lines) if not line.startswith("step ")}
    assert list(notes) == [5, 23] and notes[5].startswith("  answers cut off: 50%") and ": 100%" in notes[23]
    assert "`sampling.max_tokens`" in notes[5]


def test_of_two_findings_the_worse_one_comes_first(tmp_path: Path) -> None:
    lines = printed([TOO_LONG | FAILING] * 7, tmp_path)
    assert [line[2:14] for line in lines if not line.startswith("step ")] == ["reward fails", "answers cut "]


def test_a_finding_that_was_gone_for_long_is_told_again(tmp_path: Path) -> None:
    steps = [TOO_LONG] * 6 + [{"truncated": 0.0}] * 32 + [TOO_LONG] * 10
    assert sum("cut off" in line for line in printed(steps, tmp_path)) == 2


def test_a_resumed_run_knows_the_steps_before(tmp_path: Path) -> None:
    sink = JsonlSink()
    sink.open(RunInfo("run", tmp_path))
    for step in range(1, 6):
        sink.log(step, TOO_LONG | {"loss": float("nan")})
    sink.close()
    notes = StepFindings()
    notes.open(RunInfo("run", tmp_path, config={"sampling": {"max_tokens": 9}}))
    assert "at `sampling.max_tokens=9`" in notes.note(6, TOO_LONG)


def test_late_scores_of_an_evaluation_are_seen(tmp_path: Path) -> None:
    """The reward rises while the scores fall, and the last score comes behind the last step."""
    text = io.StringIO()
    sink = ConsoleSink(make_console("plain", text), ["reward"], notes=StepFindings())
    sink.open(RunInfo("run", tmp_path))
    for step in range(1, 41):
        sink.log(step, {"reward": step / 40})
    for step in (20, 30, 40):
        sink.log(step, {"eval/mean@1": 1 - step / 40}, late=True)
    assert text.getvalue().splitlines()[-1].startswith("  reward gamed: ")


def test_a_rule_that_fails_ends_the_notes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(diagnosis.RULES, "clip", lambda _: (1 / 0 for _ in "x"))
    lines = printed([TOO_LONG] * 3, tmp_path)
    assert len(lines) == 3 and sum("division by zero" in record.message for record in caplog.records) == 1
