"""Multiple choice: the option that an answer chooses, in any wording."""

from __future__ import annotations

import time
from typing import Any

import pytest

from etude.errors import DataError
from etude.records import Task
from etude.rewards import MultipleChoice
from etude.rewards.multiple_choice import extract_choice, read_options
from tests.rewards.tasks import task
from tests.sweeps import later

OPTIONS = {"A": "Berlin", "B": "Paris", "C": "A cat", "D": "10 km/h"}


@pytest.mark.parametrize(
    ("answer", "known", "unknown"),
    [
        ("B", "B", "B"),
        ("(B)", "B", "B"),
        (" B.\n", "B", "B"),
        ("**B**", "B", "B"),
        ("[B]", "B", "B"),
        ("B) Paris", "B", None),
        ("B) Berlin", None, None),
        ("Option C", "C", "C"),
        ("Answer: B", "B", "B"),
        ("Answer B", "B", "B"),
        ("answer:\n\nB", "B", "B"),
        ("The answer is (B).", "B", "B"),
        ("The correct choice is option B because it is.", "B", "B"),
        ("My answer would be C", "C", "C"),
        ("**Answer:** **B**", "B", "B"),
        ("Answer: **B) Paris**", "B", "B"),
        ("Final answer: D) 10 km/h", "D", "D"),
        ("The answer is not A. The answer is B", "B", "B"),
        ("The answer is A? No: the answer is B.", "B", "B"),
        ("So the answer is $\\boxed{\\textbf{(B)}}$", "B", "B"),
        ("\\boxed{A} … no, \\boxed{B}", "B", "B"),
        ("\\boxed{\\text{Paris}}", None, None),
        ("\\boxed{Paris}", "B", None),
        ("\\boxed{B} is wrong, the answer is A", "B", "B"),
        ("\\boxed{none}\nAnswer: A", None, None),
        ("A is wrong, and so is C.\nB", "B", "B"),
        ("It can only be one of them.\nParis", "B", None),
        ("Paris.", "B", None),
        ("The answer is Paris", "B", None),
        ("A cat", "C", None),
        ("Answer: A cat", "C", None),
        ("Answer: I don't know", None, None),
        ("I think that B is right", None, None),
        ("A good idea", None, None),
        ("A or B", None, None),
        ("A, B", None, None),
        ("Answer: E", None, "E"),
        ("Answer: B or C", None, None),
        ("Answer: A or B", None, None),
        ("Answer: B/C", None, None),
        ("The answer is B and C", None, None),
        ("The answer is (B) or (C).", None, None),
        ("**Answer:** **B** or **C**", None, None),
        ("Answer: A, B, C, D", None, None),
        ("Answer: B (or C)", None, None),
        ("Answer: B) Paris or C) A cat", None, "B"),
        ("The answer is A. No, answer: B, or option C", None, None),
        ("The answer is B, not C", "B", "B"),
        ("The answer is B, and I think so because it is large", "B", "B"),
        ("The answer is B, C and D are wrong", "B", "B"),
        ("Answer: B. C is wrong", "B", "B"),
        ("AB", None, None),
        ("", None, None),
    ],
)
def test_the_chosen_option_is_extracted(answer: str, known: str | None, unknown: str | None) -> None:
    assert extract_choice(answer, OPTIONS) == known
    assert extract_choice(answer, {}) == unknown


def test_small_letters_are_choices_with_that_option() -> None:
    assert extract_choice("b)", OPTIONS) is None and extract_choice("b)", OPTIONS, lower_case=True) == "B"
    assert MultipleChoice(lower_case=True)(task("B", choices=["x", "y"]), "b") == 1
    assert MultipleChoice()(task("B", choices=["x", "y"]), "b") == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"choices": ["Berlin", "Paris"]},
        {"options": {"A": "Berlin", "B": "Paris"}},
        {"choices": {"label": ["A", "B"], "text": ["Berlin", "Paris"]}},
        {"options": {"(a)": "Berlin", "(b)": "Paris"}},
    ],
)
@pytest.mark.parametrize("truth", ["B", "b", "(B)", "Paris", 1, "1", "B) Paris"])
def test_options_and_right_answers_are_read_in_the_forms_of_data_sets(fields: dict[str, Any], truth: Any) -> None:
    question = task(truth, **fields)
    assert read_options(question) == {"A": "Berlin", "B": "Paris"}
    assert MultipleChoice()(question, "The answer is B.") == 1 == MultipleChoice()(question, "Paris")
    assert MultipleChoice()(question, "The answer is A.") == 0 == MultipleChoice()(question, "London")


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", [str, int])
def test_a_right_answer_is_a_label_rather_than_an_index(first: int, kind: type) -> None:
    texts = ["Berlin", "Paris", "Rome", "Oslo"]
    labels = [str(n) for n in range(first, first + 4)]
    for label, letter in zip(labels, "ABCD", strict=True):
        for fields in (
            {"choices": {"label": labels, "text": texts}},
            {"options": dict(zip(labels, texts, strict=True))},
        ):
            question = task(kind(label), **fields)
            assert read_options(question) == dict(zip("ABCD", texts, strict=True))
            assert [MultipleChoice()(question, f"Answer: {choice}") for choice in "ABCD"] == [
                choice == letter for choice in "ABCD"
            ]


def test_letters_are_enough_where_the_prompt_shows_the_options() -> None:
    assert MultipleChoice()(task("C"), "Answer: C") == 1 and MultipleChoice()(task(2), "Answer: C") == 1
    assert MultipleChoice().extract("Answer: C") == "C" and MultipleChoice().extract("Hm.") is None


@pytest.mark.parametrize("truth", [None, "Rome", "E", 7, -1, True, ["B"], "7"])
def test_a_task_whose_right_answer_is_no_option_is_refused(truth: Any) -> None:
    with pytest.raises(
        DataError, match=r"The right answer of task 7 of sums is .*, which is none of its options \(A, B\)"
    ):
        MultipleChoice().check(task(truth, choices=["Berlin", "Paris"]))
    MultipleChoice().check(Task(0, {"ground_truth": "Z"}))


UNITS = [
    "answer ",
    " ",
    "answer:\n",
    "answer is ",
    "(",
    "*",
    "option choice ",
    "A ",
    "\\text{",
    "answer: A",
    ", B",
    "/ ",
]


@pytest.mark.parametrize("unit", later(UNITS))
def test_long_answers_are_read_at_once(unit: str) -> None:
    began = time.process_time()
    for tail in ("", "answer: ", "x"):
        extract_choice(unit * (100_000 // len(unit)) + tail, OPTIONS, lower_case=True)
    assert time.process_time() - began < 3
