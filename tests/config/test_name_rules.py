"""Rules for option names: words of one meaning, patterns that explain a whole name, and other objects."""

from __future__ import annotations

import pytest

from etude.config.name_rules import NameRules
from etude.config.suggestions import count_slips

RULES = NameRules(
    synonyms={"every": "every freq interval", "save": "save saving ckpt", "rate": "rate lr learning_rate"},
    fillers=frozenset({"trainer", "the"}),
    contexts={"critic": "train. critic.train.", "reward": ""},
    patterns={
        "save every": "checkpoint.every",
        "save every async": "checkpoint.async_every",
        "rate warmup?": "train.learning_rate",
        "mask": "one",
        "mask|veil": "two",
    },
)


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("save_freq", ["checkpoint.every"]),
        ("saveInterval", ["checkpoint.every"]),
        ("trainer.ckpt.interval", ["checkpoint.every"]),
        ("the_save_freq.enabled", ["checkpoint.every"]),
        ("learning_rate", ["train.learning_rate"]),
        ("warmup_lr", ["train.learning_rate"]),
        ("critic.optimizer.lr", ["critic.train.learning_rate"]),
        ("async_save_freq", ["checkpoint.async_every"]),
        ("mask", ["one", "two"]),
    ],
)
def test_words_of_one_meaning_are_one_word(name: str, answers: list[str]) -> None:
    assert RULES.find_answers(name) == answers


@pytest.mark.parametrize("name", ["save_freq_ratio", "freq", "warmup", "reward.lr", "critic.save_freq", "savefreq", ""])
def test_a_name_that_is_not_explained_whole_has_no_answer(name: str) -> None:
    assert RULES.find_answers(name) == []


@pytest.mark.parametrize(
    ("written", "meant", "slips"),
    [("steps", "steps", 0), ("stepz", "steps", 1), ("optm", "optim", 1), ("weigth", "weight", 1), ("", "lr", 2)],
)
def test_slips_are_letters_too_few_too_many_wrong_or_swapped(written: str, meant: str, slips: int) -> None:
    assert count_slips(written, meant) == count_slips(meant, written) == slips
