"""The reward of multiple choice: the option that an answer chooses, compared with the right one.

The options are the task's column `choices` or `options`. It is a list of texts, which are A, B, C … in order, or a
mapping of letters to texts, also as `{"label": [...], "text": [...]}`. A task may have no options if its prompt shows
them; then only letters are known. The right answer is an option's label, its letter, its text, or its index from 0.
Labels that are numbers become letters: the least of 1, 2, 3 is A.

The reward searches for the choice in this order:

    \\boxed{B}                                            the last one
    Answer: B   The answer is (B)   the correct option: B  the last one
    B   (B)   **B.**   B) Paris                           the last line, or the whole text
    Paris                                                 the last line, or the whole text, as the text of one option
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from etude.errors import DataError
from etude.records import Task
from etude.rewards.base import RewardFunction, describe_task
from etude.rewards.maths import extract_boxed
from etude.rewards.text import split_words

COLUMNS = ("choices", "options")
# Every repetition is bounded, so that the search stays linear in the text.
_OPEN = r"[\s*_`\"'(\[{$]{0,9}(?:\\text\w{0,9}\{)?[\s(]{0,9}"
# A letter must be alone, and not the beginning of `A cat` or `I think`.
_CLOSE = r"(?![A-Za-z0-9])(?!'[a-z])(?!(?<=[AI])\s{1,9}(?!because|since|as\b|which|and\b|or\b)[a-z])"
_DECLARED = re.compile(
    r"(?i:\b(?:answer|choice|option)\b(?:\s{1,9}(?:choice|option|letter))?[\s*_`]{0,9}(?:is|would\s+be|must\s+be|=|:)"
    rf"(?:\s{{1,9}}(?:option|choice|letter)\b)?[\s:*_`]{{0,9}}){_OPEN}([A-Z]){_CLOSE}"
)
_ALONE = re.compile(
    rf"{_OPEN}(?:(?i:option|choice|answer)\s{{0,9}}:?\s{{0,9}})?\(?([A-Z])(?:[)\].:,}}\"'*_`$\s]{{1,9}}(.*))?",
    re.DOTALL,
)
_HEDGE = re.compile(  # a second option after the first, without a statement about it
    rf"(?:[)\]}}*_`\"'$]{{0,9}}[ \t]{{0,9}}(?:[,;]?[ \t]{{0,9}}\(?(?i:or|and)\b|[,;/&+]){_OPEN}"
    rf"(?:(?i:option|choice)\s{{1,9}})?([A-Z]){_CLOSE}){{1,26}}+(?![\s)*_`]{{1,9}}(?:is|are|was|were|can|cannot|do|does)\b)"
)
_AFTER = re.compile(r"(?i)\banswer(?:\s{1,9}is)?[\s*_`]{0,9}:?[\s*_`]{1,9}")


class MultipleChoice(RewardFunction):
    """1 if the answer chooses the right option. An answer without a choice, or with an unknown option, gets 0."""

    lower_case: bool = Field(False, description="accept a single lower-case letter as a choice too, as in `b)`")

    quick: ClassVar[bool] = True

    def check(self, task: Task) -> None:
        _read_right_letter(task, read_options(task))

    def __call__(self, task: Task, answer: str) -> float:
        options = read_options(task)
        return float(extract_choice(answer, options, lower_case=self.lower_case) == _read_right_letter(task, options))

    def extract(self, answer: str) -> str | None:
        """Return the chosen letter, as far as it can be found without the options."""
        return extract_choice(answer, {}, lower_case=self.lower_case)


def extract_choice(answer: str, options: Mapping[str, str], *, lower_case: bool = False) -> str | None:
    """Return the letter of the option that an answer chooses, or None if the choice is unclear."""
    last = answer.strip().rpartition("\n")[2].strip()
    boxed = extract_boxed(answer)
    if boxed is not None:
        return _match_option(boxed, options, lower_case=lower_case)
    after = _AFTER.split(last)[-1]
    if options and after != last and (found := _match_option(after, options, lower_case=lower_case)) is not None:
        return found
    declared = [found for found in _DECLARED.finditer(answer) if not options or found[1] in options]
    if declared:
        return (
            None
            if _names_second_option(answer[declared[-1].end() :], options.get(declared[-1][1], ""), options)
            else declared[-1][1]
        )
    for text in dict.fromkeys((last, answer, after)):
        if (found := _match_option(text, options, lower_case=lower_case)) is not None:
            return found
    return None


def _match_option(text: str, options: Mapping[str, str], *, lower_case: bool) -> str | None:
    """Return the option that a text names and nothing else: by its letter, its text, or both. Otherwise None."""
    plain = text.strip()
    matching = [
        letter for letter, option in options.items() if split_words(option) == split_words(plain) and split_words(plain)
    ]
    if len(matching) == 1:
        return matching[0]
    if lower_case and not plain[1:2].isalnum():
        plain = plain[:1].upper() + plain[1:]
    match = _ALONE.fullmatch(plain)
    if not match or (options and match[1] not in options):
        return None
    rest_words = split_words(match[2] or "")
    if rest_words and rest_words != split_words(options.get(match[1], "")):
        return None
    return match[1]


def _names_second_option(rest: str, text: str, options: Mapping[str, str]) -> bool:
    """Return True if the rest of the line after a letter, and after its option's text, names another option."""
    line = rest.partition("\n")[0]
    bare = line.lstrip(" ).:]*_`")
    candidates = [line, bare[len(text) :]] if text and bare.lower().startswith(text.lower()) else [line]
    return any((match := _HEDGE.match(text_part)) and (not options or match[1] in options) for text_part in candidates)


def read_options(task: Task) -> dict[str, str]:
    """Return the texts of a task's options by letter; empty if the task has none."""
    labels, texts = _read_labels_and_texts(task)
    return dict(zip(_labels_to_letters(labels), texts, strict=False))


def _read_labels_and_texts(task: Task) -> tuple[list[str], list[str]]:
    """Return the labels of a task's options, and their texts."""
    options: Any = next((task.fields[name] for name in COLUMNS if task.fields.get(name)), None)
    if isinstance(options, Mapping) and {"label", "text"} <= options.keys():
        return list(map(_normalize_label, options["label"])), list(map(str, options["text"]))
    if isinstance(options, Mapping):
        return list(map(_normalize_label, options)), list(map(str, options.values()))
    if isinstance(options, list):
        return list(string.ascii_uppercase[: len(options)]), list(map(str, options))
    return [], []


def _normalize_label(label: Any) -> str:
    return str(label).strip("(). ").upper()


def _labels_to_letters(labels: Sequence[str]) -> list[str]:
    """Return the letters for these labels. Some data sets number their options, from 1 or from 0."""
    if not all(label.isdecimal() and int(label) <= 26 for label in labels):
        return list(labels)
    first = min(map(int, labels), default=0)
    return [string.ascii_uppercase[min(int(label) - first, 25)] for label in labels]


def _read_right_letter(task: Task, options: Mapping[str, str]) -> str:
    """Return the letter of the right option."""
    truth = task.fields.get("ground_truth")
    labels, _ = _read_labels_and_texts(task)
    if isinstance(truth, str | int) and not isinstance(truth, bool) and _normalize_label(truth) in labels:
        return _labels_to_letters(labels)[labels.index(_normalize_label(truth))]
    if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < (len(options) or 26):
        return list(options or string.ascii_uppercase)[truth]
    if isinstance(truth, str):
        if (found := extract_choice(truth, options, lower_case=True)) is not None:
            return found
        if truth.strip().isdecimal():
            return _read_right_letter(
                Task(task.ordinal, {**task.fields, "ground_truth": int(truth)}, task.source), options
            )
    raise DataError(
        f"The right answer of {describe_task(task)} is {truth!r}, which is none of its options "
        f"({', '.join(options) or 'letters from A to Z'}). Give a letter, the text of an option, or its index from 0; "
        f"`data.columns.answer=…` names the column."
    )
