"""The comparison of a program's output or results with the expected ones, in a process of the sandbox.

A program can build a value that hangs or raises when it is compared, hashed or shown. In the sandbox that fails the
program's test, and the trainer is safe.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

TOLERANCE = 1e-6
"""The relative or absolute tolerance of numbers that are written with a point or an exponent."""
_FRACTIONAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")


def from_json(text: str) -> Any:
    """Return the value of a JSON text, or the text itself where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def outputs_match(expected: str, actual: str) -> bool:
    """Return True if a script printed the expected output, compared line by line without empty lines at the end.

    Indentation counts only if an expected line has some, because the output is then a text drawing. Other spaces do not
    count. A number that is written with a point or an exponent may differ by a millionth.
    """
    expected_lines, actual_lines = _lines(expected), _lines(actual)
    if expected_lines == actual_lines:
        return True
    if any(line[:1].isspace() for line in expected_lines) and [*map(_indent, expected_lines)] != [
        *map(_indent, actual_lines)
    ]:
        return False
    expected_words, actual_words = ([line.split() for line in lines] for lines in (expected_lines, actual_lines))
    return [*map(len, expected_words)] == [*map(len, actual_words)] and all(
        map(_same_word, chain.from_iterable(expected_words), chain.from_iterable(actual_words))
    )


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_word(expected: str, actual: str) -> bool:
    if expected == actual:
        return True
    if not _FRACTIONAL.fullmatch(expected):
        return False
    with suppress(ValueError):
        return _near(float(expected), float(actual))
    return False


def values_match(expected: Any, actual: Any) -> bool:
    """Return True if a function returned the expected result, which comes from JSON and so is less exact.

    Tuples equal lists, and keys are text. The expected result may be in a list of one. An expected text also stands for
    the JSON value that it holds. Floats may differ by a millionth.
    """
    candidates = [expected, from_json(expected)] if isinstance(expected, str) else [expected]
    candidates += [candidate[0] for candidate in candidates if isinstance(candidate, list) and len(candidate) == 1]
    return any(_same(candidate, actual) for candidate in candidates)


def _same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(actual, list | tuple)
            and len(expected) == len(actual)
            and all(_same(*pair) for pair in zip(expected, actual, strict=True))
        )
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping):
            return False
        actual_by_key = {str(key): value for key, value in actual.items()}
        return expected.keys() == actual_by_key.keys() and all(
            _same(value, actual_by_key[key]) for key, value in expected.items()
        )
    if isinstance(expected, float) and isinstance(actual, int | float) and not isinstance(actual, bool):
        try:
            return _near(expected, float(actual))
        except OverflowError:
            return False  # an integer larger than any float
    return bool(expected == actual) and isinstance(expected, bool) == isinstance(actual, bool)


def _near(expected: float, actual: float) -> bool:
    return math.isclose(expected, actual, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (
        math.isnan(expected) and math.isnan(actual)
    )
