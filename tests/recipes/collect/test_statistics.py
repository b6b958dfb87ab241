"""What is said of a step's collection: at once, and again only when it has become twice as much."""

from __future__ import annotations

import pytest

from etude.observe import configure_logging
from etude.recipes.collect.statistics import CollectionStatistics, CollectionWarnings


def said(
    capsys: pytest.CaptureFixture[str],
    notices: CollectionWarnings,
    step: int,
    tally: CollectionStatistics,
    *earned: float,
) -> str:
    configure_logging("info")
    capsys.readouterr()
    notices.warn_about_step(step, tally, earned or (0.0, 1.0), zero_variance=len(set(earned)) == 1)
    return capsys.readouterr().err


def failing(**causes: int) -> CollectionStatistics:
    tally = CollectionStatistics(error="The reward mine raised KeyError: 'x'.")
    tally.failed.update(causes)
    return tally


def test_failures_are_told_with_their_causes_and_the_last_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    notices = CollectionWarnings(one_by_one=False)
    assert said(capsys, notices, 1, CollectionStatistics()) == ""
    told = said(capsys, notices, 2, failing(failed=2, timed_out=1))
    assert "In step 2 attempts at answers failed: 2 failed, 1 timed out. The last: The reward mine raised" in told
    assert said(capsys, notices, 3, failing(failed=2)) == "", "not yet twice as many"
    assert "In step 4" in said(capsys, notices, 4, failing(failed=1))


def test_steps_that_teach_nothing_are_told_of_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    notices = CollectionWarnings(one_by_one=False)
    told = {step: said(capsys, notices, step, CollectionStatistics(), 1.0, 1.0) for step in range(1, 10)}
    assert [step for step, sentence in told.items() if sentence] == [1, 2, 4, 8]
    assert "earned the same (all 1): there" in told[1] and "as in the 3 before" in told[4]
    assert said(capsys, notices, 10, CollectionStatistics(), 0.0, 1.0) == ""
    assert "In step 11" in said(capsys, notices, 11, CollectionStatistics(), 0.5, 0.5), "counted anew"


def test_a_base_that_hardly_ever_succeeds_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    notices, rare = CollectionWarnings(one_by_one=False), [1.0, *[0.0] * 31]
    told = said(capsys, notices, 1, CollectionStatistics(), *rare)
    assert "In step 1, 1 of 32 answers earned more than the least, 0" in told and "etude sft" in told
    assert said(capsys, notices, 2, CollectionStatistics(), *rare) == ""
    assert said(capsys, CollectionWarnings(one_by_one=False), 7, CollectionStatistics(), *rare) == "", (
        "the run was resumed"
    )
    assert (
        said(capsys, CollectionWarnings(one_by_one=False), 1, CollectionStatistics(), *[1.0, 1.0], *[0.0] * 30) == ""
    ), "enough to learn from"
    assert said(capsys, CollectionWarnings(one_by_one=False, pays=False), 1, CollectionStatistics(), *rare) == ""


def test_slow_judging_is_hinted_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    slow = CollectionStatistics()
    slow.began -= 4.0
    slow.judging_seconds = 3.0
    assert said(capsys, CollectionWarnings(one_by_one=False), 1, slow) == ""
    notices = CollectionWarnings(one_by_one=True)
    assert "Judging took 3.0 s of the 4.0 s" in said(capsys, notices, 1, slow)
    assert said(capsys, notices, 2, slow) == ""


def test_the_numbers_are_by_cause() -> None:
    tally = failing(failed=2)
    tally.dropped["every rollout failed"] = 1
    found = tally.metrics(zero_variance=1, groups=4).reduce()
    assert found["failed_attempts/failed"] == 2 and found["dropped_tasks/every_rollout_failed"] == 1
    assert found["zero_variance_groups"] == 0.25 and found["failed_attempts"] == 2


def test_the_rate_of_failures_is_a_share_of_attempts() -> None:
    tally = failing(failed=2, timed_out=1)
    tally.attempts = 12
    tally.failed_parts.update(style=3)
    found = tally.metrics(zero_variance=0, groups=1).reduce()
    assert found["failed_share"] == 0.25 and found["failed_parts/style"] == 3
    assert "failed_share" not in CollectionStatistics().metrics(zero_variance=0, groups=1).reduce(), (
        "of no attempts there is no share"
    )
