"""The final expression of an answer: a set of answers as models write them, each judged by hand."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from etude.rewards import Math
from etude.rewards.maths import extract_boxed
from tests.rewards.tasks import task
from tests.sweeps import later

GOLD: list[tuple[Any, str, int]] = [
    # where the answer is
    ("42", "So \\boxed{42}.", 1),
    ("42", "First \\boxed{41}, no: \\boxed{42}", 1),
    ("42", "First \\boxed{42}, no: \\boxed{41}", 0),
    ("42", "\\boxed{42} hmm, or is it 43?", 1),
    ("42", "42", 1),
    ("42", "The answer is 42.", 1),
    ("42", "Final answer: **42**", 1),
    ("42", "It is 6*7.\n\nAnswer:\n42\n", 1),
    ("42", "so $x = 42$.", 1),
    ("42", "It takes 42 days.", 1),
    ("42", "The answer is 41.", 0),
    ("42", "", 0),
    ("42", "\\boxed{}", 0),
    ("42", "\\boxed{42", 1),  # it never ends, so the text is read
    ("42", "I do not know.", 0),
    ("42", "\\boxed{\\boxed{42}}", 1),
    ("42", "\\boxed{$42$}", 1),
    ("42", "\\boxed{\\text{42}}", 1),
    ("Since 6*7=42, it is \\boxed{42}", "42", 1),
    ("$42$", "\\boxed{42}", 1),
    # an expression is not the number at its end or beginning
    ("2", "The answer is 2\\sqrt{2}.", 0),
    ("2\\sqrt{2}", "The answer is 2\\sqrt{2}.", 1),
    ("1", "The answer is 2x+1", 0),
    ("2x+1", "The answer is 1+2x.", 1),
    ("3", "The answer is 2\\sin(3)", 0),
    ("3", "The answer is 2sin(3)", 0),
    # numbers
    ("\\frac{1}{2}", "\\boxed{0.5}", 1),
    ("\\frac12", "\\boxed{\\dfrac{1}{2}}", 1),
    ("1/2", "\\boxed{\\frac{2}{4}}", 1),
    ("-\\frac{1}{2}", "\\boxed{\\frac{-1}{2}}", 1),
    ("\\frac{4}{3}", "\\boxed{1.33}", 0),
    ("2\\frac{1}{2}", "\\boxed{2.5}", 1),
    ("1,234", "\\boxed{1234}", 1),
    ("1234", "\\boxed{1{,}234}", 1),
    ("-3", "\\boxed{3}", 0),
    ("8", "\\boxed{8.0}", 1),
    ("\\sqrt{18}", "\\boxed{3\\sqrt{2}}", 1),
    ("1024", "\\boxed{2^{10}}", 1),
    ("3628800", "\\boxed{10!}", 1),
    ("\\pi", "\\boxed{3.14}", 0),
    ("10\\%", "\\boxed{10\\%}", 1),
    ("10", "\\boxed{10\\%}", 1),
    ("10\\%", "\\boxed{20\\%}", 0),
    ("0.1", "10%", 1),
    ("5", "\\boxed{\\$5}", 1),
    ("5", "\\boxed{5\\text{ cm}}", 1),
    ("90", "\\boxed{90^\\circ}", 1),
    (42, "\\boxed{42}", 1),
    # expressions
    ("x^2+2x+1", "\\boxed{(x+1)^2}", 1),
    ("x^2+2x+1", "\\boxed{(x+2)^2}", 0),
    ("a+b", "\\boxed{b+a}", 1),
    ("x=5", "\\boxed{5}", 1),
    ("5", "\\boxed{x=5}", 1),
    ("y=2x+3", "\\boxed{y=3+2x}", 1),
    ("1+i", "\\boxed{i+1}", 1),
    ("\\infty", "\\boxed{\\infty}", 1),
    # sets, intervals, tuples, matrices, relations
    ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1),
    ("1,2", "\\boxed{2, 1}", 1),
    ("1,2", "\\boxed{1}", 0),
    ("1", "\\boxed{1, 2, 3}", 0),  # naming every number is no answer
    ("(3,4)", "\\boxed{(3, 4)}", 1),
    ("(3,4)", "\\boxed{(4,3)}", 0),
    ("[0,1)", "\\boxed{[0,1)}", 1),
    ("[0,1)", "\\boxed{[0,1]}", 0),
    ("x \\le 3", "\\boxed{x<3}", 0),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", 1),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix}2\\\\1\\end{pmatrix}}", 0),
    # words and choices
    ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", 1),
    ("\\text{Evelyn}", "\\boxed{\\text{Bob}}", 0),
    ("(B)", "The answer is (B).", 1),
    ("B", "\\boxed{\\text{(B)}}", 1),
    ("B", "\\boxed{C}", 0),
    # what does not parse
    ("42", "\\boxed{((((}", 0),
    ("42", "\\boxed{\\frac{1}}", 0),
    ("42", "\\boxed{42}}}}", 1),
    ("42", "\\boxed{\\left\\{42\\right.}", 0),
    (["41", "42"], "\\boxed{42}", 1),
]


@pytest.mark.parametrize(
    ("truth", "answer", "expected"), later(GOLD, every=3), ids=[f"{row[0]}-{row[1]!r}"[:40] for row in GOLD]
)
def test_answers_of_the_gold_set_are_judged_right(truth: Any, answer: str, expected: int) -> None:
    assert Math()(task(truth), answer) == expected


def test_judging_works_outside_the_main_thread() -> None:
    """math-verify by itself only works on the main thread."""
    rewards: list[float] = []
    thread = threading.Thread(target=lambda: rewards.append(Math()(task("1/2"), "\\boxed{0.5}")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


def test_braces_are_balanced() -> None:
    assert extract_boxed("a \\boxed{\\frac{1}{2}} b") == "\\frac{1}{2}"
    assert extract_boxed("\\boxed{\\{1\\}}") == "\\{1\\}"
    assert extract_boxed("\\boxed{1") is None and extract_boxed("1") is None


def test_the_final_expression_is_extracted_as_it_is_written() -> None:
    extract = Math().extract
    assert extract("so \\boxed{ 2x + 1 }") == extract("I think\nThe answer is $2x+1$.") == "2x+1"
    assert extract("I do not know") is None
