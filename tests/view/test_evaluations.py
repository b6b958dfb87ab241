"""The pages of rollouts that score the policy: nothing says of them what holds only for those of training."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from etude.store import PolicyEvaluated, RolloutQueued, TaskDropped, TaskIssued, open_store
from tests.view.browser import READY, Browser, texts
from tests.view.made import Viewer, rollout_events, turn, write_run

BEFORE, AFTER = 2**40, 2**40 + 2**30
"""The rollouts that score the policy before the first step and after step 1."""
pytestmark = pytest.mark.usefixtures("without_problems")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "run", steps=1)
    with closing(open_store(root / "run" / "journal.sqlite")) as store:
        for step, id in enumerate((BEFORE, AFTER)):
            store.append([TaskIssued(id, 0, "sums", {"prompt": "1 + 1"}, "val"), RolloutQueued(id, id, 0, "val")])
            store.append(rollout_events(id, 1.0, turn(2, step, "two")))
            store.append([TaskDropped(id, step, "it was asked to score the model")])
        other = AFTER + 2**10
        store.append(
            [TaskIssued(other, 1, "words", {"prompt": "Say it"}, "val"), RolloutQueued(other, other, 0, "val")]
        )
        store.append(rollout_events(other, 0.5, turn(2, 1, "two")))
        store.append([TaskDropped(other, 1, "it was asked to score the model")])
        scores = {"eval/mean@1": 0.75, "eval/failed": 0, "eval/sums/mean@1": 1.0, "eval/words/mean@1": 0.5}
        store.append([PolicyEvaluated(1, "val", scores)])
    return root


def test_an_evaluation_has_its_scores_and_its_answers(browser: Browser, address: str) -> None:
    browser.open(f"{address}run?run=run")
    browser.until(f"{READY} && document.querySelector('a[href^=evaluation]')")
    browser.evaluate("document.querySelector('a[href^=evaluation]').click()")
    browser.until(f"{READY} && document.querySelector('.shown')")
    assert texts(browser, "h1") == ["Evaluation after step 1"] and texts(browser, ".shown") == ["1 to 2 of 2"]
    scores, answers = (texts(browser, f"section[aria-label={name}] tbody tr") for name in ("scores", "answers"))
    assert [row.split("\t") for row in scores] == [
        ["all", "2", "2", "0.7500", "0"],
        ["sums", "1", "1", "1"],
        ["words", "1", "1", "0.5000"],
    ]
    assert [[cell.strip() for cell in row.split("\t")[1:6]] for row in answers] == [
        ["0", "sums", "1", "1 + 1", "two"],
        ["1", "words", "0.5000", "Say it", "two"],
    ]
    browser.open(f"{address}evaluation?run=run&step=1&source=words")
    browser.until(f"{READY} && document.querySelector('.shown')?.innerText == '1 to 1 of 1'")
    browser.press("k")
    browser.until(f"{READY} && document.querySelector('h1')?.innerText == 'Evaluation after step 0'")
    assert texts(browser, "main .muted").count("The answers of this step are not all scored yet.") == 1


def test_pages_of_answers_and_unknown_steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.view.queries.evaluation.MOST_ANSWERS", 1)
    viewer = Viewer(root)
    second = viewer.get("evaluation", run="run", **{"from": 1})
    assert (second["count"], second["first"], second["answers"]["source"]) == (2, 1, ["words"])
    unknown = viewer.ask("api/evaluation?run=run&step=7")
    assert unknown.status_code == 404 and "it has those of 0, 1." in unknown.text


def test_rollouts_of_evaluations_have_words_of_their_own(browser: Browser, address: str) -> None:
    browser.open(f"{address}search?run=run&q=use:evaluation")
    browser.until(f"{READY} && document.querySelector('.looked')?.innerText.startsWith('3 found')")
    steps = texts(browser, "tbody td:nth-child(3)")
    assert steps == ["1", "1", "0"] and texts(browser, "tbody a[href^=step]") == ["1", "1"], "step 0 has no page"
    browser.open(f"{address}rollout?run=run&rollout={AFTER}")
    browser.until(f"{READY} && document.querySelector('.fate')")
    assert "scored after step\n1" in texts(browser, ".facts div") and "batch" not in " ".join(texts(browser, "h2"))
    browser.open(f"{address}group?run=run&task={AFTER}")
    browser.until(f"{READY} && document.querySelector('.answer')")
    assert texts(browser, ".fate") == ["It was sampled to score the policy, and no step trains on it."]
    assert texts(browser, ".answer .said") == ["two"] and not texts(browser, "mark"), "it has no other answers"
    assert "row of the evaluation's data" in texts(browser, ".facts dt")
