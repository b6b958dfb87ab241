"""What is said of a step's collection: at once, and again only when it has become twice as much."""

from __future__ import annotations

import pytest

from etude.observe import configure_logging
from etude.recipes.collect.statistics import CollectionStatistics, CollectionWarnings


def warnings_of(
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


def test_failures_are_reported_with_their_causes_and_the_last_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    notices = CollectionWarnings(one_by_one=False)
    assert warnings_of(capsys, notices, 1, CollectionStatistics()) == ""
    message = warnings_of(capsys, notices, 2, failing(failed=2, timed_out=1))
    assert "In step 2 attempts at answers failed: 2 failed, 1 timed out. The last: The reward mine raised" in message
    assert warnings_of(capsys, notices, 3, failing(failed=2)) == "", "not yet twice as many"
    assert "In step 4" in warnings_of(capsys, notices, 4, failing(failed=1))


def test_steps_that_teach_nothing_are_reported_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    notices = CollectionWarnings(one_by_one=False)
    message = {step: warnings_of(capsys, notices, step, CollectionStatistics(), 1.0, 1.0) for step in range(1, 10)}
    assert [step for step, sentence in message.items() if sentence] == [1, 2, 4, 8]
    assert "earned the same (all 1): there" in message[1] and "as in the 3 before" in message[4]
    assert warnings_of(capsys, notices, 10, CollectionStatistics(), 0.0, 1.0) == ""
    assert "In step 11" in warnings_of(capsys, notices, 11, CollectionStatistics(), 0.5, 0.5), "counted anew"


def test_a_base_that_hardly_ever_succeeds_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    notices, rare = CollectionWarnings(one_by_one=False), [1.0, *[0.0] * 31]
    message = warnings_of(capsys, notices, 1, CollectionStatistics(), *rare)
    assert "In step 1, 1 of 32 answers earned more than the least, 0" in message and "etude sft" in message
    assert warnings_of(capsys, notices, 2, CollectionStatistics(), *rare) == ""
    assert warnings_of(capsys, CollectionWarnings(one_by_one=False), 7, CollectionStatistics(), *rare) == "", (
        "the run was resumed"
    )
    assert (
        warnings_of(capsys, CollectionWarnings(one_by_one=False), 1, CollectionStatistics(), *[1.0, 1.0], *[0.0] * 30)
        == ""
    ), "enough to learn from"
    assert warnings_of(capsys, CollectionWarnings(one_by_one=False, pays=False), 1, CollectionStatistics(), *rare) == ""


def test_slow_judging_is_hinted_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    slow = CollectionStatistics()
    slow.began -= 4.0
    slow.judging_seconds = 3.0
    assert warnings_of(capsys, CollectionWarnings(one_by_one=False), 1, slow) == ""
    notices = CollectionWarnings(one_by_one=True)
    assert "Judging took 3.0 s of the 4.0 s" in warnings_of(capsys, notices, 1, slow)
    assert warnings_of(capsys, notices, 2, slow) == ""


def test_the_numbers_are_by_cause() -> None:
    tally = failing(failed=2)
    tally.dropped["every rollout failed"] = 1
    result = tally.metrics().reduce()
    assert result["failed_attempts/failed"] == 2 and result["dropped_tasks/every_rollout_failed"] == 1
    assert result["failed_attempts"] == 2


def test_the_rate_of_failures_is_a_share_of_attempts() -> None:
    tally = failing(failed=2, timed_out=1)
    tally.attempts = 12
    tally.failed_parts.update(style=3)
    result = tally.metrics().reduce()
    assert result["failed_share"] == 0.25 and result["failed_parts/style"] == 3
    assert "failed_share" not in CollectionStatistics().metrics().reduce(), "of no attempts there is no share"
