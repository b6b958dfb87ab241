"""Warnings about a step's collection: the first at once, and later ones when the count has doubled."""

from __future__ import annotations

import numpy as np
import pytest

from etude.observe import configure_logging
from etude.recipes.collect.rollouts import PlayedRollout
from etude.recipes.collect.statistics import CollectionStatistics, CollectionWarnings
from etude.records import Completion, Turn
from etude.rewards import Verdict
from etude.support import Support, encode_ids


def warnings_of(
    capsys: pytest.CaptureFixture[str],
    warnings: CollectionWarnings,
    step: int,
    statistics: CollectionStatistics,
    *rewards: float,
) -> str:
    configure_logging("info")
    capsys.readouterr()
    warnings.warn_about_step(step, statistics, rewards or (0.0, 1.0), zero_variance=len(set(rewards)) == 1)
    return capsys.readouterr().err


def failing(**causes: int) -> CollectionStatistics:
    statistics = CollectionStatistics(error="The reward mine raised KeyError: 'x'.")
    statistics.failed.update(causes)
    return statistics


def test_failures_are_reported_with_their_causes_and_the_last_error(capsys: pytest.CaptureFixture[str]) -> None:
    warnings = CollectionWarnings(one_by_one=False)
    assert warnings_of(capsys, warnings, 1, CollectionStatistics()) == ""
    messages = warnings_of(capsys, warnings, 2, failing(failed=2, timed_out=1))
    assert "In step 2 attempts at answers failed: 2 failed, 1 timed out. The last: The reward mine raised" in messages
    assert warnings_of(capsys, warnings, 3, failing(failed=2)) == "", "the count has not doubled"
    assert "In step 4" in warnings_of(capsys, warnings, 4, failing(failed=1))


def test_replacements_of_failed_tasks_are_counted_apart() -> None:
    statistics = failing(failed=9)
    statistics.dropped.update({"failed": 8})
    assert "each of 8 tasks failed. The last failure: The" in str(statistics.nothing_to_train_on(1, 8))
    assert "each of 8 tasks failed, 4 of them as replacements. " in str(statistics.nothing_to_train_on(1, 4))


def test_steps_of_zero_variance_are_reported_at_doubling_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    warnings = CollectionWarnings(one_by_one=False)
    messages = {step: warnings_of(capsys, warnings, step, CollectionStatistics(), 1.0, 1.0) for step in range(1, 10)}
    assert [step for step, sentence in messages.items() if sentence] == [1, 2, 4, 8]
    assert "In step 1 every rollout of each group earned the same (all 1): there" in messages[1]
    assert "In step 2, as in the step before, every" in messages[2] and "as in the 3 steps before, every" in messages[4]
    assert warnings_of(capsys, warnings, 10, CollectionStatistics(), 0.0, 1.0) == ""
    assert "In step 11" in warnings_of(capsys, warnings, 11, CollectionStatistics(), 0.5, 0.5), "the count starts again"


def test_a_model_that_rarely_succeeds_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    warnings, rare = CollectionWarnings(one_by_one=False), [1.0, *[0.0] * 31]
    messages = warnings_of(capsys, warnings, 1, CollectionStatistics(), *rare)
    assert "In step 1, 1 of 32 answers got more than the lowest reward, 0" in messages and "etude sft" in messages
    assert warnings_of(capsys, warnings, 2, CollectionStatistics(), *rare) == ""
    assert warnings_of(capsys, CollectionWarnings(one_by_one=False), 7, CollectionStatistics(), *rare) == "", (
        "the run was resumed"
    )
    assert (
        warnings_of(capsys, CollectionWarnings(one_by_one=False), 1, CollectionStatistics(), *[1.0, 1.0], *[0.0] * 30)
        == ""
    ), "there are enough successes"
    assert warnings_of(capsys, CollectionWarnings(one_by_one=False, pays=False), 1, CollectionStatistics(), *rare) == ""


def test_slow_judging_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    slow = CollectionStatistics()
    slow.began -= 4.0
    slow.judging_seconds = 3.0
    assert warnings_of(capsys, CollectionWarnings(one_by_one=False), 1, slow) == ""
    warnings = CollectionWarnings(one_by_one=True)
    assert "Judging took 3.0 s of the 4.0 s" in warnings_of(capsys, warnings, 1, slow)
    assert warnings_of(capsys, warnings, 2, slow) == ""


def test_failures_and_drops_are_counted_by_cause() -> None:
    statistics = failing(failed=2)
    statistics.dropped["every rollout failed"] = 1
    result = statistics.metrics().reduce()
    assert result["failed_attempts/failed"] == 2 and result["dropped_tasks/every_rollout_failed"] == 1
    assert result["failed_attempts"] == 2


def test_the_rate_of_failures_is_a_share_of_attempts() -> None:
    statistics = failing(failed=2, timed_out=1)
    statistics.attempts = 12
    statistics.failed_parts.update(style=3)
    result = statistics.metrics().reduce()
    assert result["failed_share"] == 0.25 and result["failed_parts/style"] == 3
    assert "failed_share" not in CollectionStatistics().metrics().reduce(), "without attempts there is no share"


def test_the_models_own_probability_of_the_sets_is_measured_at_temperature_1() -> None:
    support = Support.build([encode_ids([3, 5], 9), None])
    columns = np.log(np.array([[0.4, 0.5], [0.2, 0.5]], np.float32))
    completion = Completion(
        np.array([3, 4], np.int32), columns[0], np.zeros(2, np.int32), "stop", raw_logp=columns[1], support=support
    )
    statistics = CollectionStatistics()
    statistics.add_attempt(PlayedRollout((Turn(np.zeros(1, np.int32), completion, 0),), Verdict(1.0)))
    assert statistics.metrics().reduce()["support/kept_mass"] == pytest.approx((0.5 + 1) / 2)
    assert "support/kept_mass" not in statistics.metrics(tempered=True).reduce()
