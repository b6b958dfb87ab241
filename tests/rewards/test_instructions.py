"""Instructions that can be verified, each with texts that follow it and texts that do not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from etude.errors import DataError
from etude.records import Task
from etude.rewards import Instructions
from etude.rewards.constraints import CONSTRAINTS, UNVERIFIABLE, is_satisfied, make_loose_variants
from etude.rewards.instructions import read_instructions
from tests.rewards.tasks import task
from tests.sweeps import later

CASES: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {
    "existence": [({"keywords": ["cat", "Dog"]}, ["A Cat, a dog."], ["A cat."])],
    "frequency": [
        ({"keyword": "a.b", "frequency": 2, "relation": "at least"}, ["a.b A.B"], ["a.b axb"]),
        ({"keyword": "x", "frequency": 2, "relation": "less than"}, ["x"], ["x x"]),
    ],
    "forbidden_words": [({"forbidden_words": ["cat", "c++"]}, ["A category, c+."], ["A Cat.", "in C++!"])],
    "letter_frequency": [({"letter": "e", "let_frequency": 2, "let_relation": "at least"}, ["Ere"], ["er", "bar"])],
    "number_words": [
        ({"num_words": 3, "relation": "at least"}, ["one two three", "it's two"], ["one two"]),
        ({"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
        ({"num_words": 2, "relation": "exactly"}, ["one two"], ["one"]),
    ],
    "number_sentences": [
        (
            {"num_sentences": 2, "relation": "exactly"},
            ["One. Two!", "Is it? Yes", "He met Dr. Low. They spoke.", "It costs 3.5 euros. Good.", "“One.” Two."],
            ["One.", "One. Two. Three."],
        ),
        ({"num_sentences": 3, "relation": "less than"}, ["One. Two."], ["One. Two. Three."]),
    ],
    "number_characters": [({"num_characters": 4}, [" abcd "], ["abcde"])],
    "number_lines": [({"num_lines": 2}, ["a\n\nb\n"], ["a", "a\nb\nc"])],
    "number_paragraphs": [({"num_paragraphs": 2}, ["a\n***\nb", "a *** b ***"], ["a", "a *** *** b", "a\n\nb"])],
    "nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
            ["First.\n\nThen, yes.", "a\n\n'then' b"],
            ["Then.\n\nFirst.", "First.", "First.\n\nThen.\n\nLast."],
        ),
        ({"num_paragraphs": 1, "nth_paragraph": 3, "first_word": "a"}, [], ["a"]),
    ],
    "number_bullet_lists": [
        ({"num_bullets": 2}, ["* a\n* b", "Two:\n - a\n- b"], ["* a", "* a\n* b\n* c", "**a**\n**b**"])
    ],
    "number_highlighted_sections": [({"num_highlights": 2}, ["*a* and *b*", "**a** **b**"], ["*a*", "** **"])],
    "multiple_sections": [
        ({"section_spliter": "Part", "num_sections": 2}, ["Part 1\na\nPart 2\nb"], ["Part 1\na", "Part"])
    ],
    "number_placeholders": [({"num_placeholders": 2}, ["Dear [name], [place]."], ["Dear [name]."])],
    "json_format": [({}, ['{"a": 1}', "```json\n[1]\n```", "```\n3\n```"], ["{'a': 1}", "So: {}", "[" * 100_000])],
    "title": [({}, ["<<A day>>\nIt rained."], ["<A day>", "<< >>"])],
    "constrained_response": [({}, ["My answer is yes.", "Well. My answer is maybe."], ["Yes."])],
    "two_responses": [({}, ["a\n******\nb"], ["a", "a******a", "a******b******c", "a************b"])],
    "repeat_prompt": [({"prompt_to_repeat": "What is it?"}, ["what is it?\nA cat."], ["A cat. What is it?"])],
    "postscript": [
        ({"postscript_marker": "P.S."}, ["Bye.\nP.S. more", "p. s. more"], ["Bye.", "PS more"]),
        ({"postscript_marker": "P.P.S"}, ["P.P.S more", "p. p. s more"], ["P.S. more"]),
        ({"postscript_marker": "Note:"}, ["note: x"], ["x"]),
    ],
    "starts_with": [({"start_phrase": "Dear all"}, ["dear all, hello"], ["Hello, dear all"])],
    "end_checker": [({"end_phrase": "The end."}, ["So. the end.", '"It was the end."'], ["The end. So."])],
    "quotation": [({}, ['"All of it."', ' "" '], ['"', 'Half "of it"'])],
    "capital_word_frequency": [
        ({"capital_frequency": 2, "capital_relation": "at least"}, ["A BIG cat"], ["BIG cat"]),
        ({"capital_frequency": 1, "capital_relation": "less than"}, ["a cat"], ["A cat"]),
    ],
    "english_capital": [({}, ["ALL OF IT, 3 TIMES."], ["All of it.", "123"])],
    "english_lowercase": [({}, ["all of it, 3 times."], ["All of it."])],
    "no_comma": [({}, ["all of it"], ["all, of it"])],
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_accepts_and_rejects_texts(name: str) -> None:
    for arguments, followed, broken in CASES[name]:
        for text in followed:
            assert is_satisfied(name, arguments, text), (arguments, text)
        for text in [*broken, "", " \n"]:
            assert not is_satisfied(name, arguments, text), (arguments, text)


@pytest.mark.parametrize(
    "unit", later([".", "[", "<<", "*", "* ", "- ", "\n", " \n", "p. ", "******", "a", "```", "Part 1"])
)
def test_long_texts_are_verified_at_once(unit: str) -> None:
    began = time.process_time()
    for tail in ("", "x"):
        text = unit * (100_000 // len(unit)) + tail
        for name, cases in CASES.items():
            for arguments, _, _ in cases:
                is_satisfied(name, arguments, text)
    assert time.process_time() - began < 5


def test_an_introduction_and_emphasis_are_forgiven() -> None:
    assert make_loose_variants("a\nb\nc") == ["a\nb\nc", "b\nc", "a\nb", "b", "a\nb\nc", "b\nc", "a\nb", "b"]
    wanted = task([{"name": "english_lowercase"}, {"name": "starts_with", "start_phrase": "dear"}])
    text = "Sure, here it is:\n*dear* all"
    assert Instructions()(wanted, text) == 0 and Instructions(loose=True)(wanted, text) == 1
    assert Instructions(loose=True)(wanted, "dear All\nOf you") == 0


TWO: dict[str, Any] = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{}, {"num_words": 3, "relation": "at least", "keywords": None}],
}


@pytest.mark.parametrize(
    "truth",
    [
        TWO,
        json.dumps(TWO),
        [TWO],
        json.dumps([{"instruction_id": TWO["instruction_id_list"], "kwargs": [None, TWO["kwargs"][1]]}]),
        TWO | {"kwargs": json.dumps(TWO["kwargs"])},
        ["no_comma", {"name": "number_words", "num_words": 3, "relation": "at least"}],
    ],
)
def test_the_reward_is_for_all_or_for_a_share_of_constraints(truth: Any) -> None:
    assert read_instructions(task(truth)) == (
        ("no_comma", {}),
        ("number_words", {"num_words": 3, "relation": "at least"}),
    )
    for text, share in (("one two three", 1.0), ("one, two, three", 0.5), ("one,", 0.0)):
        assert Instructions(score="share")(task(truth), text) == share
        assert Instructions()(task(truth), text) == float(share == 1)


def test_separate_columns_are_read_if_there_is_no_right_answer() -> None:
    row = Task(0, {"prompt": "p", "ground_truth": None, **TWO})
    Instructions().check(row)
    assert Instructions()(row, "one two three") == 1


def test_thinking_is_not_verified() -> None:
    wanted = task(["no_comma"])
    text = "<think>Well, so, then.</think>Done."
    assert Instructions()(wanted, text) == 0 and Instructions(after="</think>")(wanted, text) == 1


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (None, "the value|there are none|one has no name"),
        ("be brief", "the right answer is text, and not JSON"),
        (7, "the value is of type int"),
        ([], "there are none"),
        ({"a": 1}, "one has no name"),
        (["no_coma"], "there is no `no_coma`; did you mean no_comma?"),
        (["rhyme:xyz"], "there is no `rhyme:xyz`; there are existence, frequency"),
        (["language:response_language"], "`language:response_language` cannot be verified: detecting a language"),
        ([{"name": "number_words"}], "`number_words` lacks num_words"),
        ([{"name": "no_comma", "much": 1}], "`no_comma` has the arguments much, and takes nothing"),
        ([{"name": "existence", "keywords": "cat"}], "`keywords` of `existence` must be a list"),
        (TWO | {"kwargs": [{}]}, "there are 2 names, and `kwargs` is no list of as many"),
    ],
)
def test_unreadable_constraints_are_refused(truth: Any, message: str) -> None:
    with pytest.raises(DataError, match=r"The instructions of task 7 of sums cannot be used: ") as caught:
        Instructions().check(task(truth))
    assert any(part in str(caught.value) for part in message.split("|"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "number_words", "num_words": 3, "relation": "around"},
        {"name": "number_words", "num_words": "few"},
        {"name": "letter_frequency", "letter": 3, "let_frequency": 1},
    ],
)
def test_unknown_constraints_are_refused(wrong: Any) -> None:
    with pytest.raises(DataError, match=r"The instruction `\w+` of task 7 of sums cannot be verified: "):
        Instructions().check(task([wrong]))


def test_every_instruction_of_ifeval_is_known() -> None:
    ifeval = """
    existence frequency forbidden_words letter_frequency response_language number_sentences number_paragraphs
    number_words nth_paragraph_first_word number_placeholders postscript number_bullet_lists constrained_response
    number_highlighted_sections multiple_sections json_format title two_responses repeat_prompt end_checker quotation
    capital_word_frequency english_capital english_lowercase no_comma"""
    assert set(ifeval.split()) <= CONSTRAINTS.keys() | UNVERIFIABLE.keys() and set(CASES) == set(CONSTRAINTS)
