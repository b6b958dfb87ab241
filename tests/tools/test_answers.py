"""`etude answers`: the answers of a step, best first, from a journal that may still be written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from etude.cli import main
from etude.integrity import write_text
from etude.recipes.run.resume.session_log import record_session
from etude.records import Completion, Outcome, Turn
from etude.store import open_store
from etude.store.journal.events import (
    AttemptEnded,
    AttemptRewarded,
    AttemptStarted,
    NoteRecorded,
    RolloutQueued,
    RolloutsAdmitted,
    TaskDropped,
    TaskIssued,
    TurnRecorded,
)
from etude.tools.answers import load_answers

Captured = pytest.CaptureFixture[str]


WRONG_AND_LONG = [("wrong", 0.0), ("right " * 100, 1.0)]


def answered(directory: Path, steps: int = 2, texts: Sequence[tuple[str, float]] = WRONG_AND_LONG) -> Path:
    """Create a run of some steps, each of two tasks with these answers; the long ones were cut off."""
    directory.mkdir()
    with closing(open_store(directory / "journal.sqlite")) as store:
        for step in range(1, steps + 1):
            admitted = []
            for task in (2 * step, 2 * step + 1):
                prompt = "1+1=" if task % 2 else [{"role": "user", "content": f"What is {task}?"}]
                store.append([TaskIssued(task, task, "sums", {"prompt": prompt, "ground_truth": "2"})])
                for sample, (text, earned) in enumerate(texts):
                    rollout = len(texts) * task + sample
                    admitted.append(rollout)
                    ids, drawn = np.zeros(3, np.int32), np.zeros(3, np.float32)
                    completion = Completion(ids, drawn, ids, "length" if len(text) > 100 else "stop", text)
                    turn = Turn(np.array([1, 2], np.int32), completion, 0)
                    store.append([RolloutQueued(rollout, task, sample), AttemptStarted(rollout, 0)])
                    store.append(
                        [TurnRecorded(rollout, 0, turn), AttemptRewarded(rollout, 0, earned, {"form": 0.5}, False)]
                    )
                    store.append([AttemptEnded(rollout, 0, Outcome.SUCCEEDED, "", False)])
            store.append([RolloutsAdmitted(step, tuple(admitted), end=0, version=0)])
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return answered(tmp_path / "run")


def test_the_last_step_is_shown_best_first(run: Path, capsys: Captured) -> None:
    assert main(["answers", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Step 2: 4 answers to 2 tasks.")
    assert "user: What is 4?" in shown and "1+1=" in shown
    assert shown.index("right") < shown.index("wrong") and "form" in shown and "[length]" in shown
    assert "right " * 60 not in shown.replace("\n", "")


def test_equal_answers_share_a_row(tmp_path: Path, capsys: Captured) -> None:
    run = answered(tmp_path / "run", texts=[("same", 1.0), ("same", 1.0), ("other", 0.0)])
    assert main(["answers", str(run), "-n", "1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:6]]
    assert [(row[0], row[-1]) for row in rows[1:]] == [("2", "same"), ("1", "other")]


def test_a_step_and_how_much_of_it_may_be_chosen(run: Path, capsys: Captured) -> None:
    assert main(["answers", str(run), "--step", "1", "-n", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Step 1") and "What is 2?" in shown and "1+1=" not in shown and "1 more" in shown


def test_programs_get_every_answer_in_full(run: Path, capsys: Captured) -> None:
    assert main(["answers", str(run), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4 and {line["step"] for line in lines} == {2}
    assert [main(["answers", str(run), "--json", "-n", "1"]), main(["answers", str(run), "--json", "-n", "0"])] == [
        0,
        2,
    ]
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert lines[1]["answer"] == "right " * 100 and lines[1]["parts"] == {"form": 0.5} and lines[1]["tokens"] == 3


def test_the_fields_of_a_task_are_not_shown_as_a_prompt(tmp_path: Path, capsys: Captured) -> None:
    """Tasks of agents have no prompt, and an agent may end without a call of the model."""
    with closing(open_store(tmp_path / "journal.sqlite")) as store:
        store.append([TaskIssued(0, 0, "", {"question": "How many?", "shelf": {"A": 4}, "prompt": None, "row": 3})])
        store.append([RolloutQueued(0, 0, 0), AttemptStarted(0, 0), AttemptRewarded(0, 0, 0.5, {}, False)])
        store.append([AttemptEnded(0, 0, Outcome.SUCCEEDED, "", False), RolloutsAdmitted(1, (0,), end=0, version=0)])
    assert main(["answers", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Task 0\n" in shown and "How many?" not in shown and "row" not in shown
    (answer,) = load_answers(tmp_path)[1]
    assert answer["answer"] == "" and answer["prompt"] == []


def test_the_reward_of_a_turn_is_shown_beside_it(tmp_path: Path, capsys: Captured) -> None:
    ids = np.zeros(1, np.int32)
    turns = [
        Turn(ids, Completion(ids, np.zeros(1, np.float32), ids, "stop", text), n, reward=paid)
        for n, (text, paid) in enumerate([("first", 0.25), ("second", None)])
    ]
    write_text(tmp_path / "run.yaml", "model: {path: nowhere, tokenizer: null}")
    with closing(open_store(tmp_path / "journal.sqlite")) as store:
        store.append([TaskIssued(0, 0, "", {"prompt": "?"}), RolloutQueued(0, 0, 0), AttemptStarted(0, 0)])
        store.append([*(TurnRecorded(0, 0, turn) for turn in turns), AttemptRewarded(0, 0, -0.0, {}, False)])
        store.append([AttemptEnded(0, 0, Outcome.SUCCEEDED, "", False), RolloutsAdmitted(1, (0,), end=0, version=0)])
    assert main(["answers", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "first  [reward 0.2500]" in shown and "second" in shown and "-0.0000" not in shown
    assert [one.get("reward") for one in load_answers(tmp_path)[1][0]["conversation"]] == [0.25, None]


def failing(directory: Path) -> Path:
    """Create a run whose first step trained on one of two attempts, and left out a task whose two attempts failed."""
    directory.mkdir()
    write_text(
        directory / "run.yaml", "{model: {path: nowhere, tokenizer: null}, agent: {path: a:b, failed_reward: drop}}"
    )
    refused = {"path": "/v1/responses", "status": 400, "error": "'audio' is not supported."}
    with closing(open_store(directory / "journal.sqlite")) as store:
        for task in (0, 1):
            store.append([TaskIssued(task, task, "", {"question": f"q{task}", "prompt": None})])
            for rollout in (2 * task, 2 * task + 1):
                store.append([RolloutQueued(rollout, task, rollout % 2), AttemptStarted(rollout, 0)])
        store.append([AttemptRewarded(0, 0, 1.0, {}, False), AttemptEnded(0, 0, Outcome.SUCCEEDED, "", False)])
        store.append(
            [NoteRecorded(1, 0, "refused", refused), AttemptEnded(1, 0, Outcome.FAILED, "exit code 1.", False)]
        )
        store.append([AttemptEnded(2, 0, Outcome.TIMED_OUT, "It did not end within 9 s.", False)])
        store.append([AttemptEnded(3, 0, Outcome.FAILED, "Traceback " + "x" * 900 + " the end", False)])
        store.append([TaskDropped(1, 1, "every rollout failed"), RolloutsAdmitted(1, (0,), end=0, version=0)])
    return directory


def test_rollouts_that_failed_are_shown_with_their_outcome_and_cause(tmp_path: Path, capsys: Captured) -> None:
    run = failing(tmp_path / "run")
    assert main(["answers", str(run), "-n", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("Step 1: 4 answers to 2 tasks. 3 of these rollouts failed; each has its cause.")
    assert "failed: exit code 1. The endpoint refused a call to /v1/responses (400): 'audio' is not" in shown
    assert "timed_out: It did not end within 9 s." in shown
    assert "failed: Traceback x" in shown and "the end" in shown and "x" * 400 not in shown
    answers = load_answers(run)[1]
    assert [(answer["task"], answer["outcome"], answer["reward"]) for answer in answers] == [
        *((0, "succeeded", 1.0), (0, "failed", None)),
        *((1, "timed_out", None), (1, "failed", None)),
    ]
    assert main(["answers", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[1])["error"].startswith("exit code 1.\nThe endpoint")


def test_a_step_without_trained_rollouts_is_shown_too(tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with closing(open_store(run / "journal.sqlite")) as store:
        store.append([TaskIssued(0, 0, "", {"prompt": "?"}), RolloutQueued(0, 0, 0), AttemptStarted(0, 0)])
        store.append([AttemptEnded(0, 0, Outcome.FAILED, "no such tool", False), TaskDropped(0, 1, "all failed")])
    assert main(["answers", str(run)]) == 0
    assert "failed: no such tool" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("finish", "turns", "end"), [("stop", 2, "max_turns"), ("stop", 1, "truncated"), ("length", 2, "length")]
)
def test_the_reason_of_a_truncation_is_named(
    finish: str, turns: int, end: str, tmp_path: Path, capsys: Captured
) -> None:
    ids = np.zeros(1, np.int32)
    write_text(tmp_path / "run.yaml", "{model: {path: nowhere, tokenizer: null}, env: {max_turns: 2}}")
    with closing(open_store(tmp_path / "journal.sqlite")) as store:
        store.append([TaskIssued(0, 0, "", {"prompt": "?"}), RolloutQueued(0, 0, 0), AttemptStarted(0, 0)])
        for n in range(turns):
            completion = Completion(ids, np.zeros(1, np.float32), ids, finish, "said")  # type: ignore[arg-type]
            store.append([TurnRecorded(0, 0, Turn(ids, completion, n))])
        store.append([AttemptRewarded(0, 0, 0.5, {}, True), AttemptEnded(0, 0, Outcome.SUCCEEDED, "", False)])
        store.append([RolloutsAdmitted(1, (0,), end=0, version=0)])
    assert main(["answers", str(tmp_path)]) == 0
    assert f"[{end}]" in capsys.readouterr().out


def test_a_journal_that_is_being_written_is_read(run: Path) -> None:
    with closing(open_store(run / "journal.sqlite")):
        assert load_answers(run)[0] == 2


def test_an_impossible_request_is_reported(run: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["answers", str(tmp_path)]) == 2
    assert "has no journal.sqlite" in capsys.readouterr().err
    assert main(["answers", str(tmp_path / "nowhere")]) == 2
    assert "There is no directory" in capsys.readouterr().err
    assert main(["answers", str(run), "--step", "7"]) == 2
    assert "no step 7; it has collected steps 1 to 2" in capsys.readouterr().err
    assert main(["answers", str(answered(tmp_path / "new", steps=0))]) == 2
    assert "has not collected its first step yet. Wait until it has." in capsys.readouterr().err


def test_a_run_that_ended_without_a_step_is_not_waited_for(tmp_path: Path, capsys: Captured) -> None:
    run = answered(tmp_path / "run", steps=0)
    with suppress(ValueError), record_session(run, lambda: 0, lambda: False):
        raise ValueError("no column 'answer'")
    assert main(["answers", str(run)]) == 2
    failed = "It failed: ValueError: no column 'answer'. Correct the cause. Give its command once more with "
    assert f"{failed}`directory={run}`." in capsys.readouterr().err
    with record_session(run, lambda: 0, lambda: False):
        assert main(["answers", str(run)]) == 2
    assert "Wait until it has." in capsys.readouterr().err
    assert main(["answers", str(run)]) == 2
    assert "It was stopped before that." in capsys.readouterr().err
