"""Rewards that compare text: exactly, by a pattern, by shared words, by format."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import ClassVar

from pydantic import Field, model_validator

from etude.errors import ConfigError
from etude.records import Task
from etude.rewards.base import RewardFunction, read_ground_truths

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset({"a", "an", "the"})


def split_words(text: str) -> list[str]:
    """Return the words of a text as in SQuAD's scorer: lower case, without punctuation and articles."""
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES]


class ExactMatch(RewardFunction):
    """1 if the answer, without spaces around it, is the ground truth or an item of a list of ground truths."""

    loose: bool = Field(False, description="ignore case, punctuation, articles and spacing")

    quick: ClassVar[bool] = True

    def check(self, task: Task) -> None:
        read_ground_truths(task)

    def __call__(self, task: Task, answer: str) -> float:
        if self.loose:
            return float(any(split_words(answer) == split_words(truth) for truth in read_ground_truths(task)))
        return float(answer.strip() in [truth.strip() for truth in read_ground_truths(task)])

    def extract(self, answer: str) -> str:
        """Return the whole answer in the form that is compared."""
        return " ".join(split_words(answer)) if self.loose else answer.strip()


class Regex(RewardFunction):
    """A search for a pattern anywhere in the answer, of whose matches the last one counts.

    With a group in the pattern: 1 if the group's match, without spaces around it, is the ground truth.
    Without a group: 1 if the pattern matches. The ground truth is not read.

    A pattern can run forever on an unlucky answer, and its own process cannot stop it. So it runs in worker processes.
    """

    pattern: str = Field(
        description="regular expression to search for; its group, if any, is compared with the ground truth"
    )

    default_workers: ClassVar[int] = 2

    @model_validator(mode="after")
    def _pattern_is_one(self) -> Regex:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"`pattern` is '{self.pattern}', which is no regular expression: {error}.") from error
        if groups > 1:
            raise ConfigError(
                f"`pattern` has {groups} groups, and one is compared with the ground truth. Write the others as (?:…)."
            )
        return self

    def check(self, task: Task) -> None:
        if re.compile(self.pattern).groups:
            read_ground_truths(task)

    def __call__(self, task: Task, answer: str) -> float:
        matches = list(re.finditer(self.pattern, answer))
        if not matches or not matches[-1].re.groups:
            return float(bool(matches))
        extracted = matches[-1][1] or ""
        return float(extracted.strip() in [truth.strip() for truth in read_ground_truths(task)])

    def extract(self, answer: str) -> str | None:
        """Return the group of the last match; None for a pattern without a group."""
        matches = list(re.finditer(self.pattern, answer))
        return (matches[-1][1] or "").strip() if matches and matches[-1].re.groups else None


class F1(RewardFunction):
    """The F1 score of the words shared with the ground truth, as in SQuAD: the harmonic mean of precision and recall.

    With a list of ground truths, the best score counts. Two texts without words are equal.
    """

    quick: ClassVar[bool] = True

    def check(self, task: Task) -> None:
        read_ground_truths(task)

    def __call__(self, task: Task, answer: str) -> float:
        answer_words = split_words(answer)
        return max(_f1_score(answer_words, split_words(truth)) for truth in read_ground_truths(task))


class Format(RewardFunction):
    """1 if the answer consists of these sections, once each and in order: `<think>…</think><answer>…</answer>`.

    Spaces and line ends between sections are allowed; an empty section is not. The ground truth is not read.
    """

    tags: tuple[str, ...] = Field(("think", "answer"), min_length=1, description="names of the sections, in order")

    quick: ClassVar[bool] = True

    def __call__(self, task: Task, answer: str) -> float:  # noqa: ARG002
        rest = answer.strip()
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if answer.count(opening) != 1 or answer.count(closing) != 1 or not rest.startswith(opening):
                return 0.0
            content, _, rest = rest[len(opening) :].partition(closing)
            if not content.strip():
                return 0.0
            rest = rest.lstrip()
        return float(not rest)


def _f1_score(answer_words: list[str], truth_words: list[str]) -> float:
    """Return the F1 score of two bags of words."""
    if not answer_words or not truth_words:
        return float(answer_words == truth_words)
    common = (Counter(answer_words) & Counter(truth_words)).total()
    return 2 * common / (len(answer_words) + len(truth_words))
