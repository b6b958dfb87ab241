"""The pages of rollouts that score the policy: nothing says of them what holds only for those of training."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from etude.store import RolloutQueued, TaskDropped, TaskIssued, open_store
from tests.view.browser import READY, Browser, texts
from tests.view.made import rollout_events, turn, write_run

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
    return root


def test_evaluations_are_found_from_their_run_and_have_words_of_their_own(browser: Browser, address: str) -> None:
    browser.open(f"{address}run?run=run")
    browser.until(f"{READY} && document.querySelector('a[href*=evaluation]')")
    browser.evaluate("document.querySelector('a[href*=evaluation]').click()")
    browser.until(f"{READY} && document.querySelector('.looked')?.innerText.startsWith('2 found')")
    steps = texts(browser, "tbody td:nth-child(3)")
    assert steps == ["1", "0"] and texts(browser, "tbody a[href^=step]") == ["1"], "step 0 has no page"
    browser.open(f"{address}rollout?run=run&rollout={AFTER}")
    browser.until(f"{READY} && document.querySelector('.fate')")
    assert "scored after step\n1" in texts(browser, ".facts div") and "batch" not in " ".join(texts(browser, "h2"))
    browser.open(f"{address}group?run=run&task={AFTER}")
    browser.until(f"{READY} && document.querySelector('.answer')")
    assert texts(browser, ".fate") == ["It was sampled to score the policy, and no step trains on it."]
    assert texts(browser, ".answer .said") == ["two"] and not texts(browser, "mark"), "it has no other answers"
    assert "row of the evaluation's data" in texts(browser, ".facts dt")
