"""The reward of GSM8K: the final number of an answer, compared with the ground truth as a number.

`1,000`, `1000.0` and `$1,000` are the same number; so are `3/4`, `0.75` and `\\frac{3}{4}`. A percent sign, a currency
and a unit do not change the number: `50%` is 50.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field

from etude.errors import DataError
from etude.records import Task
from etude.rewards.base import RewardFunction, describe_task, read_ground_truths

# No answer has more digits. The bound also keeps the search linear in the text, and conversions small.
_DIGITS = "[0-9]{1,30}"
_UNSIGNED = rf"(?:[0-9]{{1,3}}(?:,[0-9]{{3}}){{1,10}}(?:\.{_DIGITS})?|{_DIGITS}(?:\.{_DIGITS})?|\.{_DIGITS})"
_AMOUNT = rf"(?:{_DIGITS} {_DIGITS}/{_DIGITS}|{_UNSIGNED}(?:/{_DIGITS})?)"
_SIGN, _CURRENCY = r"[-+−–]", r"[$€£¥]"
# A sign after a letter, a digit or a bracket is an operator or a hyphen. More digits, a second fraction bar or a second
# point make a date, a version or a list, which are not numbers.
_NUMBER = re.compile(
    rf"(?:(?<![A-Za-z0-9.)\]}}])(?P<sign>{_SIGN}))?(?:{_CURRENCY}(?P<inner>{_SIGN})?)?"
    rf"(?<![A-Za-z0-9./])(?P<amount>{_AMOUNT})(?![0-9]|[.,/][0-9])"
)
_STRICT = re.compile(r"####[ \t]*")
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")


class Gsm8k(RewardFunction):
    """1 if the final number is the ground truth, which may be a whole solution that ends in `#### n`.

    `strict` reads the number right after the answer's last `####`, as in GSM8K's own solutions. `flexible` reads the
    last number anywhere in the text.
    """

    method: Literal["strict", "flexible"] = Field(
        "strict", description="`strict`: the number after the last ####; `flexible`: the last number anywhere"
    )

    quick: ClassVar[bool] = True

    def check(self, task: Task) -> None:
        for truth in read_ground_truths(task):
            self._parse_ground_truth(task, truth)

    def __call__(self, task: Task, answer: str) -> float:
        number = extract_final_number(answer, strict=self.method == "strict")
        return float(
            number is not None
            and number in [self._parse_ground_truth(task, truth) for truth in read_ground_truths(task)]
        )

    def extract(self, answer: str) -> str | None:
        """Return the final number in one normal form, equal for all notations of the number."""
        number = extract_final_number(answer, strict=self.method == "strict")
        return None if number is None else str(number)

    def _parse_ground_truth(self, task: Task, truth: str) -> Fraction:
        value = parse_number(truth.rpartition("####")[2])
        if value is None:
            raise DataError(
                f"The `ground_truth` of {describe_task(task)} is '{truth}', and gsm8k needs one that is a number."
            )
        return value


def extract_final_number(text: str, *, strict: bool) -> Fraction | None:
    """Return the final number of an answer, or None if it has none."""
    plain = _normalize_latex(text)
    match: re.Match[str] | None
    if strict:
        marks = list(_STRICT.finditer(plain))
        match = _NUMBER.match(plain, marks[-1].end()) if marks else None
    else:
        match = next(reversed(list(_NUMBER.finditer(plain))), None)
    return _to_fraction(match) if match else None


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number, with sign, currency, percent sign and separators; else None."""
    match = _NUMBER.fullmatch(_normalize_latex(text).strip().rstrip("%. "))
    return _to_fraction(match) if match else None


def _normalize_latex(text: str) -> str:
    return _FRACTION.sub(r"\1/\2", text).replace("\\$", "$").replace("\\%", "%").replace("\\!", "").replace("{,}", ",")


def _to_fraction(match: re.Match[str]) -> Fraction | None:
    amount = match["amount"].replace(",", "")
    whole, _, part = amount.rpartition(" ")
    above, _, below = part.partition("/")
    if below and int(below) == 0:
        return None
    value = Fraction(above) / int(below or 1) + int(whole or 0)
    minus = sum(match[group] in ("-", "−", "–") for group in ("sign", "inner"))
    return -value if minus == 1 else value
