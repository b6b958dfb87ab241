"""The interpretation of a reward function's result."""

from __future__ import annotations

import pytest

from etude.errors import RewardError
from etude.records import Task
from etude.rewards import parse_score
from etude.rewards.base import describe_task
from tests.rewards import functions
from tests.rewards.tasks import task


@pytest.mark.parametrize(
    ("answer", "reward", "parts"),
    [
        ("true", 1.0, {}),
        ("numpy", 0.5, {}),
        ("no dimensions", 0.25, {}),
        ("parts", 3.0, {"right": 1.0, "short": 2.0}),
    ],
)
def test_numbers_and_parts_become_rewards(answer: str, reward: float, parts: dict[str, float]) -> None:
    score = parse_score(functions.returned(task(), answer))
    assert score == (reward, parts)
    assert {type(value) for value in [score[0], *score[1].values()]} == {float}


def test_a_score_is_the_reward_and_its_text_is_left_out() -> None:
    assert parse_score(functions.compute_score("sums", "4", "4")) == (1.0, {"acc": 1.0, "seen": 0.0})


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("nan", "it returned nan; a finite number is needed"),
        ("inf", "it returned inf; a finite number"),
        ("none", "it returned None of type NoneType; a number is needed"),
        ("text", "it returned '0.5' of type str; a number is needed"),
        ("array", "it returned .* of type ndarray; a number is needed"),
        ("empty", "it returned an empty mapping"),
        ("nan part", "its part `right` is nan"),
        ("text part", "its part `right` is 'yes' of type str"),
        ("number name", "it returned a part named 1; the names of parts are text"),
        ("nan beside a score", "its part `acc` is nan"),
        ("nan score", "its `score` is nan"),
    ],
)
def test_any_other_result_is_refused_in_a_sentence(answer: str, sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        parse_score(functions.returned(task(), answer))


def test_parts_that_overflow_are_refused() -> None:
    with pytest.raises(RewardError, match="its parts sum to"):
        parse_score({"a": 1e308, "b": 1e308})


def test_errors_name_the_task() -> None:
    assert describe_task(task()) == "task 7 of sums" and describe_task(Task(3, {})) == "task 3"
