"""The final number of an answer: a set of answers as models write them, each judged by hand."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest

from etude.errors import DataError
from etude.rewards import Gsm8k
from etude.rewards.gsm8k import extract_final_number, parse_number
from tests.rewards.tasks import task
from tests.sweeps import later

# truth, answer, strict, flexible
GOLD: list[tuple[Any, str, int, int]] = [
    ("72", "She sold 48+24 = 72 clips.\n#### 72", 1, 1),
    ("72", "#### 72", 1, 1),
    ("72", "####72", 1, 1),
    ("72", "####   72.", 1, 1),
    ("72", "The answer is 72", 0, 1),
    ("72", "The answer is 72.", 0, 1),
    ("72", "#### The answer is 72", 0, 1),
    ("72", "####\n72", 0, 1),
    ("72", "#### 71", 0, 0),
    ("72", "#### 72 clips", 1, 1),
    ("72", "#### 71\nNo, wait.\n#### 72", 1, 1),
    ("72", "#### 72\nNo, wait.\n#### 71", 0, 0),
    ("72", "#### 72\nThat took 3 steps.", 1, 0),
    ("72", "### 72", 0, 1),
    ("72", "", 0, 0),
    ("72", "####", 0, 0),
    ("72", "#### seventy-two", 0, 0),
    ("72", "**72**", 0, 1),
    ("72", "\\boxed{72}", 0, 1),
    ("72", "答案是72", 0, 1),
    ("72", "#### 720", 0, 0),
    ("72", "#### 7,2", 0, 0),  # no separator of thousands
    ("72", "72kg", 0, 1),
    ("2", "CO2", 0, 0),
    ("So 5 + 67 = 72.\n#### 72", "#### 72", 1, 1),
    # separators, currency, percent
    ("1000", "#### 1,000", 1, 1),
    ("1,000", "#### 1000", 1, 1),
    ("1234567", "#### $1,234,567.00", 1, 1),
    ("1000", "#### \\$1{,}000", 1, 1),
    ("18", "#### $18", 1, 1),
    ("$18", "#### 18", 1, 1),
    ("18", "She makes €18.", 0, 1),
    ("50", "#### 50%", 1, 1),
    ("50%", "#### 50", 1, 1),
    ("50", "That is 50\\%.", 0, 1),
    ("3", "1, 2, 3", 0, 1),
    ("3", "[1,2,3]", 0, 1),
    # signs
    ("-5", "#### -5", 1, 1),
    ("-5", "#### −5", 1, 1),
    ("-5", "#### 5", 0, 0),
    ("5", "#### -5", 0, 0),
    ("-5", "#### -$5", 1, 1),
    ("-5", "#### $-5", 1, 1),
    ("5", "#### +5", 1, 1),
    ("5", "10-5", 0, 1),
    ("5", "It lies within 3-5.", 0, 1),
    ("5", "(10)-5", 0, 1),
    ("5", "Jan-5", 0, 1),
    ("-5", "it is **-5**", 0, 1),
    ("5", "- 5 apples", 0, 1),
    # decimals and fractions
    ("72", "#### 72.0", 1, 1),
    ("72", "#### 72.5", 0, 0),
    ("0.75", "#### 3/4", 1, 1),
    ("3/4", "#### 0.75", 1, 1),
    ("3/4", "#### .75", 1, 1),
    ("0.75", "#### \\frac{3}{4}", 1, 1),
    ("0.5", "#### \\dfrac{2}{4}", 1, 1),
    ("-0.75", "#### -3/4", 1, 1),
    ("2.5", "#### 2 1/2", 1, 1),
    ("-2.5", "#### -2 1/2", 1, 1),
    ("0.1", "#### 1/10", 1, 1),
    (0.1, "#### 0.1", 1, 1),
    (72, "#### 72", 1, 1),
    (["72", "73"], "#### 73", 1, 1),
    ("0.333", "#### 1/3", 0, 0),  # numbers are equal or they are not
    ("3", "#### 3/0", 0, 0),
    ("2020", "on 12/25/2020", 0, 0),  # a date is no number
    ("5", "x/5", 0, 0),
    ("12.5", "#### 12/25/2020", 0, 0),
    ("2.1", "version 4.2.1", 0, 0),
    ("1", "version 4.2.1", 0, 0),
    ("1000", "#### 1e3", 0, 0),
    ("9", "#### " + "9" * 100_000, 0, 0),
    ("9", "9/" * 10_000, 0, 0),
]


@pytest.mark.parametrize(("truth", "answer", "strict", "flexible"), GOLD, ids=[repr(row[1])[:30] for row in GOLD])
def test_answers_of_the_gold_set_are_judged_right(truth: Any, answer: str, strict: int, flexible: int) -> None:
    assert Gsm8k()(task(truth), answer) == strict
    assert Gsm8k(method="flexible")(task(truth), answer) == flexible


@pytest.mark.parametrize("truth", ["", "many", "4 or 5", "#### x", "1e3", "3/0"])
def test_a_truth_that_is_no_number_is_refused(truth: str) -> None:
    with pytest.raises(DataError, match=r"The `ground_truth` of task 7 of sums is '.*', and gsm8k needs one"):
        Gsm8k()(task(truth), "#### 4")


@pytest.mark.parametrize("piece", later(["9", "999,", "9 ", "9/", "9.", "-$", "#### ", "\\frac{9}{9}", "1 1/"]))
def test_extraction_is_quick_for_any_text(piece: str) -> None:
    began = time.thread_time()
    for method in ("strict", "flexible"):
        Gsm8k(method=method)(task("9"), "#### " + piece * (200_000 // len(piece)) + "9x")
    assert time.thread_time() - began < 2.0


def test_values_are_exact() -> None:
    assert parse_number("0.1") == Fraction(1, 10) and parse_number("-1,000.50") == Fraction(-2001, 2)
    assert extract_final_number("so 1/3", strict=False) == Fraction(1, 3)
    assert extract_final_number("so 1/3", strict=True) is None


def test_the_number_is_extracted_however_it_is_written() -> None:
    assert Gsm8k().extract("so #### 1,000.0") == Gsm8k().extract("#### $1000") == "1000"
    assert Gsm8k().extract("1000") is None and Gsm8k(method="flexible").extract("it is 1000") == "1000"
