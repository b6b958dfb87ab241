"""The limits of a rollout, and the number of its attempts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DataError
from etude.records import Outcome
from etude.store.queue.rollout_limits import MAX_INFRA_RETRIES, RETRIED, RolloutLimits

ENDS = st.lists(st.sampled_from(sorted(RETRIED)), min_size=1, max_size=20)


@given(ENDS, st.integers(1, 5), st.sets(st.sampled_from(sorted(RETRIED))))
def test_infrastructure_errors_do_not_count_as_attempts(ends: list[Outcome], most: int, retry_on: set[Outcome]) -> None:
    another = RolloutLimits(max_attempts=most, retry_on=tuple(retry_on)).allows_retry(ends)
    broken = ends.count(Outcome.INFRA_ERROR)
    if ends[-1] is Outcome.INFRA_ERROR:
        assert another == (broken <= MAX_INFRA_RETRIES)
    else:
        assert another == (ends[-1] in retry_on and len(ends) - broken < most)


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.CANCELLED])
def test_succeeded_and_cancelled_rollouts_are_not_retried(outcome: Outcome) -> None:
    assert not RolloutLimits(max_attempts=9, retry_on=tuple(RETRIED)).allows_retry([outcome])
    with pytest.raises(DataError, match=f"retry_on names {outcome}, which cannot be retried"):
        RolloutLimits(retry_on=(outcome,))


@pytest.mark.parametrize("name", ["timeout_s", "unresponsive_s", "queue_timeout_s"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_is_a_number_of_seconds(name: str, seconds: float) -> None:
    with pytest.raises(DataError, match=f"Limits.{name} is .*; it must be a number of seconds above 0"):
        RolloutLimits(**{name: seconds})  # type: ignore[arg-type]


def test_a_rollout_has_at_least_one_attempt() -> None:
    with pytest.raises(DataError, match="is 0; a rollout is tried at least once"):
        RolloutLimits(max_attempts=0)


def test_limits_are_read_back_as_written() -> None:
    for limits in (
        RolloutLimits(),
        RolloutLimits(None, 5.0, 6.0, 7, (Outcome.INFRA_ERROR,)),
        RolloutLimits(retry_on=()),
    ):
        assert RolloutLimits.from_dict(limits.to_dict()) == limits
