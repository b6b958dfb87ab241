"""The reward of mathematics: the final expression of an answer, compared with the ground truth by math-verify.

The final expression is the last `\\boxed{…}` of the text. Without a box it is the rest of the last line after its last
word (`The answer is 2x+1.`). If the text has dollar or LaTeX delimiters, or that rest is empty, math-verify searches
the text.

math-verify's own time limits need the main thread and a signal, so they are off. The judge ends a worker process
instead, which also stops code that no signal interrupts.
"""

from __future__ import annotations

import logging
import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from etude.errors import DataError
from etude.lazy import LazyModule
from etude.records import Task
from etude.rewards.base import RewardFunction, describe_task, read_ground_truths

if TYPE_CHECKING:
    import math_verify
else:
    math_verify = LazyModule("math_verify")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its limits are off, which is intended

_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi)(?![A-Za-z]))[A-Za-z]{2,}")
_PERCENT = re.compile(r"\s*\\?%\s*$")
_DELIMITED = re.compile(r"\$|\\\(|\\\[")


class Math(RewardFunction):
    """1 if the final expression equals the ground truth: as numbers, symbols, sets, intervals or matrices."""

    default_workers: ClassVar[int] = 2

    def check(self, task: Task) -> None:
        read_ground_truths(task)

    def __call__(self, task: Task, answer: str) -> float:
        for truth in read_ground_truths(task):
            if not _parse_ground_truth(truth):
                raise DataError(f"The `ground_truth` of {describe_task(task)} is '{truth}', which math cannot read.")
        return float(any(is_equal(truth, answer) for truth in read_ground_truths(task)))

    def extract(self, answer: str) -> str | None:
        """Return the final expression as the answer writes it, without spaces."""
        boxed = extract_boxed(answer)
        expression = _last_fragment(answer) if boxed is None else boxed
        return "".join(expression.strip().strip("$").split()) or None


def is_equal(truth: str, answer: str) -> bool:
    """Return True if the final expression of an answer equals a ground truth."""
    return bool(math_verify.verify(_parse_ground_truth(truth), extract_final_expression(answer), timeout_seconds=None))


def extract_final_expression(answer: str) -> list[Any]:
    """Parse the final expression of an answer with math-verify; empty if there is none."""
    boxed = extract_boxed(answer)
    if boxed is not None:
        return _parse_expression(boxed)
    if not _DELIMITED.search(answer):
        fragment = _last_fragment(answer)
        if re.search(r"\w", fragment):
            return _parse_expression(fragment)
    return _parse(answer) or _parse_expression(_last_line(answer))


def _last_line(answer: str) -> str:
    return answer.rstrip().rpartition("\n")[2]


def _last_fragment(answer: str) -> str:
    """Return the rest of the last line after its last word."""
    return _WORD.split(_last_line(answer))[-1].strip(" .:*`")


def extract_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}`, with balanced braces; None if no box is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    first, depth = start + len("\\boxed{"), 1
    for position in range(first, len(text)):
        escaped = text[position - 1] == "\\"
        depth += (text[position] == "{" and not escaped) - (text[position] == "}" and not escaped)
        if depth == 0:
            return text[first:position]
    return None


@lru_cache(maxsize=4096)
def _parse_ground_truth(truth: str) -> list[Any]:
    boxed = extract_boxed(truth)
    return _parse_expression(truth.strip().strip("$") if boxed is None else boxed)


def _parse_expression(text: str) -> list[Any]:
    """Parse a text that is one expression and nothing else."""
    text = text.strip().strip("$")
    percent = _PERCENT.search(text)
    if percent:
        return _parse(f"${text[: percent.start()]}$%")
    return _parse(f"\\boxed{{{text}}}")


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = math_verify.parse(text, extraction_config=_extraction_configs(), parsing_timeout=None)
    return parsed


@cache
def _extraction_configs() -> tuple[Any, ...]:
    """Return the notations that math-verify searches for: LaTeX and plain expressions."""
    return math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()
