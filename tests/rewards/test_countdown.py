"""Countdown: expressions as models write them, each judged by hand; no code is run."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DataError
from etude.rewards import REWARDS, Countdown
from etude.rewards.countdown import MAX_EXPRESSION_CHARS, evaluate_expression
from tests.rewards.tasks import task

PROBLEM = task({"target": 24, "numbers": [3, 3, 8, 8]})

# answer, reward: 1, or 0.5 for a wrong expression, or 0 for no expression
GOLD: list[tuple[str, float]] = [
    ("<answer>8 / (3 - 8 / 3)</answer>", 1),
    ("<think>8*3=24, 8-3=5…</think>\n<answer> 8/(3-8/3) = 24 </answer>", 1),
    ("<answer>1+1</answer> no, <answer>8 ÷ (3 − 8 ÷ 3)</answer>", 1),
    ("Let me see.\n8 / (3 - 8 / 3)", 1),
    ("8 / [3 - 8 / 3] = 24", 1),
    ("<answer>8 / (3 - 8 / 3)</answer> <answer>3 * 8</answer>", 0.5),
    ("<answer>3 * 8</answer>", 0.5),  # not every number
    ("<answer>3 * 8 * 8 / 8 * 3 / 3</answer>", 0.5),  # too often
    ("<answer>33 - 8 - 8 / 8</answer>", 0.5),  # digits joined
    ("<answer>3 + 3 + 8 + 8</answer>", 0.5),  # misses
    ("<answer>-(-8 / (3 - 8 / 3))</answer>", 1),
    ("<answer>24</answer>", 0.5),
    ("<answer></answer>", 0),
    ("<answer>8 / (3 - 8 / 3</answer>", 0),
    ("<answer>8 / (3 - 3) * 8</answer>", 0),  # no value
    ("<answer>8 ** 3</answer>", 0),
    ("<answer>24.0</answer>", 0),
    ("<answer>True</answer>", 0),
    ("<answer>__import__('os').abort()</answer>", 0),
    ("The answer is 8 / (3 - 8 / 3)", 0),  # words, and no section
    ("", 0),
]


@pytest.mark.parametrize(("answer", "earns"), GOLD)
def test_an_expression_is_judged(answer: str, earns: float) -> None:
    assert REWARDS["countdown"] is Countdown
    assert Countdown(partial=0.5)(PROBLEM, answer) == earns
    assert Countdown()(PROBLEM, answer) == float(earns == 1)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8), st.data())
def test_the_value_is_that_of_python(numbers: list[int], data: st.DataObject) -> None:
    """Random trees over the numbers: the value is that of exact arithmetic, and each number counts as often as used."""
    parts = [(str(n), Fraction(n)) for n in numbers]
    while len(parts) > 1:
        (left, a), (right, b) = parts.pop(0), parts.pop(0)
        sign = data.draw(st.sampled_from("+-*/" if b else "+-*"))
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[sign]
        parts.append((f"({left} {sign} {right})", value))
    result = evaluate_expression(parts[0][0])
    assert result is not None and result[0] == parts[0][1]
    assert sorted(result[1].elements()) == sorted(numbers)


@pytest.mark.parametrize("text", ["(" * 190, "-" * 190 + "1", "9" * 190, "9*" * 90 + "9", "+".join("1" * 90)])
def test_judging_is_quick_for_any_text(text: str) -> None:
    began = time.process_time()
    assert len(text) <= MAX_EXPRESSION_CHARS and Countdown()(PROBLEM, f"<answer>{text}</answer>") == 0
    assert Countdown()(PROBLEM, f"<answer>{text * 1000}</answer>") == 0
    assert time.process_time() - began < 5


def test_answers_with_the_same_expression_are_counted_together() -> None:
    assert Countdown().extract("<answer> 3*8 = 24</answer>") == Countdown().extract("3 * 8") == "3*8"
    assert Countdown().extract("no idea") is None


@pytest.mark.parametrize("truth", [None, "24", {"target": 24}, {"target": "24", "numbers": [1]}])
def test_a_task_without_target_or_numbers_is_refused(truth: object) -> None:
    with pytest.raises(DataError, match=r"countdown needs a `target` and the `numbers`.*etude data prepare countdown"):
        Countdown().check(task(truth))
