"""Rewards that compare text."""

from __future__ import annotations

from typing import Any

import pytest

from etude.errors import ConfigError, DataError
from etude.records import Task
from etude.rewards import F1, REWARDS, ExactMatch, Format, Gsm8k, Math, Regex, RewardFunction
from etude.rewards.text import split_words
from tests.rewards.tasks import task


@pytest.mark.parametrize(
    ("truth", "answer", "strict", "loose"),
    [
        ("4", "4", 1, 1),
        ("4", " 4\n", 1, 1),
        ("4", "4.", 0, 1),
        (4, "4", 1, 1),
        ("Paris", "paris", 0, 1),
        ("the  Eiffel tower", "Eiffel Tower!", 0, 1),
        ("Paris", "Paris, France", 0, 0),
        (["NYC", "New York"], "New York", 1, 1),
        (["NYC", "New York"], "York", 0, 0),
        ("4", "", 0, 0),
    ],
)
def test_exact_match_is_strict_or_loose(truth: Any, answer: str, strict: float, loose: float) -> None:
    assert ExactMatch()(task(truth), answer) == strict
    assert ExactMatch(loose=True)(task(truth), answer) == loose


@pytest.mark.parametrize("truth", [None, [], {"a": "b"}, ["4", None]])
def test_a_task_without_an_answer_is_refused_by_name(truth: Any) -> None:
    for reward in (ExactMatch(), F1(), Regex(pattern="(.)")):
        with pytest.raises(DataError, match=r"Task 7 of sums needs a right answer .* `data\.columns\.answer=…`"):
            reward(task(truth), "4")


@pytest.mark.parametrize(
    ("pattern", "answer", "expected"),
    [
        (r"<answer>(.*?)</answer>", "<answer> 4 </answer>", 1),
        (r"<answer>(.*?)</answer>", "<answer>4</answer> or <answer>5</answer>", 0),
        (r"<answer>(.*?)</answer>", "<answer>5</answer>, no: <answer>4</answer>", 1),
        (r"<answer>(.*?)</answer>", "4", 0),
        (r"is (\d)?", "it is ", 0),
        (r"^Answer:", "Answer: 5", 1),
        (r"^Answer:", "My answer: 4", 0),
        (r"(?i)ANSWER (?:is|was) (\d)", "the answer was 4", 1),
    ],
)
def test_a_pattern_extracts_or_searches(pattern: str, answer: str, expected: float) -> None:
    assert Regex(pattern=pattern)(task(), answer) == expected


def test_an_invalid_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`pattern` is '\(', which is no regular expression: .*unterminated"):
        Regex(pattern="(")
    with pytest.raises(ConfigError, match=r"has 2 groups, and one is compared .* Write the others as \(\?:…\)"):
        Regex(pattern="(a)(b)")


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        ("the red house", "red house", 1.0),
        ("red house", "a red car", 0.5),  # one of two words, and one of two given
        ("red house on a hill", "red", 0.4),  # 2 · 1 / (1 + 4)
        ("red red", "red", 2 / 3),
        ("red", "blue", 0.0),
        (["blue", "red house"], "red", 2 / 3),
        ("the", "a", 1.0),
        ("red", "", 0.0),
    ],
)
def test_f1_counts_shared_words(truth: Any, answer: str, expected: float) -> None:
    assert F1()(task(truth), answer) == pytest.approx(expected)


def test_words_are_compared_as_squad_does() -> None:
    assert split_words("The U.S. dollar, a  Currency!") == ["us", "dollar", "currency"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>2+2</think><answer>4</answer>", 1),
        (" <think>\n2+2\n</think>\n\n<answer>4</answer>\n", 1),
        ("<answer>4</answer><think>2+2</think>", 0),
        ("<think>2+2</think>", 0),
        ("<think></think><answer>4</answer>", 0),
        ("<think>2+2</think><answer> </answer>", 0),
        ("So: <think>2+2</think><answer>4</answer>", 0),
        ("<think>2+2</think><answer>4</answer> done", 0),
        ("<think>2+2</think> well <answer>4</answer>", 0),
        ("<think>2+2</think><answer>4</answer><answer>5</answer>", 0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0),
        ("<think>an <answer>5</answer> inside</think><answer>4</answer>", 0),
        ("<think>2+2<answer>4</answer></think>", 0),
        ("", 0),
    ],
)
def test_format_rewards_the_form_of_an_answer(answer: str, expected: float) -> None:
    assert Format()(task(None), answer) == expected


def test_the_sections_can_be_named() -> None:
    assert Format(tags=("plan",))(task(None), "<plan>go</plan>") == 1
    with pytest.raises(ConfigError):
        Format(tags=())


def test_the_table_names_each_reward_once() -> None:
    assert len(set(REWARDS.values())) == len(REWARDS)
    assert REWARDS["f1"]().title == "f1"


def test_the_judged_answer_is_extracted() -> None:
    assert ExactMatch().extract(" Paris. ") == "Paris." and ExactMatch(loose=True).extract("The Paris!") == "paris"
    reward = Regex(pattern=r"<a>(.*?)</a>")
    assert reward.extract("<a>1</a> <a> 2 </a>") == "2" and reward.extract("2") is None
    assert Regex(pattern="yes").extract("yes") is None and F1().extract("yes") is None


@pytest.mark.parametrize("reward", [ExactMatch(), F1(), Regex(pattern="(a)"), Gsm8k(), Math()], ids=lambda r: r.title)
def test_tasks_that_cannot_be_judged_are_found_before_any_answer(reward: RewardFunction) -> None:
    reward.check(Task(0, {"prompt": "1+1=", "ground_truth": "2"}))
    with pytest.raises(DataError, match=r"Task 0 needs a right answer .* and has none; it has prompt"):
        reward.check(Task(0, {"prompt": "1+1=", "ground_truth": None, "extra_info": {}, "row": 0}))


def test_a_reward_without_a_right_answer_needs_none() -> None:
    for reward in (Format(), Regex(pattern="a")):
        reward.check(Task(0, {"prompt": "1+1="}))
