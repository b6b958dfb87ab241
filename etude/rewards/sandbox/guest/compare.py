"""Compare what a program printed or returned with what is expected: in a process of the sandbox, not in the trainer.

A value from a program may be built to take forever, or to raise, wherever it is compared, hashed or shown. Here that
costs the program its test.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ["from_json", "outputs_match", "values_match"]

TOLERANCE = 1e-6
"""By how much, of itself or of 1, a number may differ that is written with a point or an exponent."""
_FRACTIONAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")


def from_json(text: str) -> Any:
    """Return the value of a JSON text, or the text itself where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def outputs_match(wanted: str, actual: str) -> bool:
    """Whether a script printed what it should: line by line, lines at the end aside. Spaces count only before lines,
    and only where what is wanted has some there: it is then a shape that is to be drawn. A number that is written with
    a point or an exponent may differ by a millionth."""
    lines, others = _lines(wanted), _lines(actual)
    if lines == others:
        return True
    if any(line[:1].isspace() for line in lines) and [*map(_indent, lines)] != [*map(_indent, others)]:
        return False
    return len(lines) == len(others) and all(_same_line(*each) for each in zip(lines, others, strict=True))


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_line(wanted: str, said: str) -> bool:
    words, others = wanted.split(), said.split()
    return len(words) == len(others) and all(_same_word(*each) for each in zip(words, others, strict=True))


def _same_word(wanted: str, said: str) -> bool:
    if wanted == said:
        return True
    if not _FRACTIONAL.fullmatch(wanted):
        return False
    with suppress(ValueError):
        return _near(float(wanted), float(said))
    return False


def values_match(wanted: Any, actual: Any) -> bool:
    """Whether a function returned what it should, which JSON cannot quite say: tuples and lists are alike, keys are
    text, a result may stand in a list of its own, and text may be what it says or what it holds as JSON. Numbers with a
    fraction may differ by a millionth."""
    meant = [wanted, from_json(wanted)] if isinstance(wanted, str) else [wanted]
    meant += [each[0] for each in meant if isinstance(each, list) and len(each) == 1]
    return any(_same(each, actual) for each in meant)


def _same(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, list):
        return (
            isinstance(found, list | tuple)
            and len(wanted) == len(found)
            and all(_same(*each) for each in zip(wanted, found, strict=True))
        )
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return False
        told = {str(key): value for key, value in found.items()}
        return wanted.keys() == told.keys() and all(_same(value, told[key]) for key, value in wanted.items())
    if isinstance(wanted, float) and isinstance(found, int | float) and not isinstance(found, bool):
        try:
            return _near(wanted, float(found))
        except OverflowError:
            return False  # a whole number beyond all that have a fraction
    return bool(wanted == found) and isinstance(wanted, bool) == isinstance(found, bool)


def _near(wanted: float, found: float) -> bool:
    return math.isclose(wanted, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (
        math.isnan(wanted) and math.isnan(found)
    )
