"""The reward of Countdown, whose answer is an expression that uses each given number once and equals the target."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

from pydantic import Field

from etude.errors import DataError
from etude.records import Task
from etude.rewards.base import RewardFunction, describe_task

MAX_EXPRESSION_CHARS = 200
"""The most characters of an expression: enough for eight numbers, and few enough to parse quickly."""
_SECTION = re.compile(r"<answer>(.*?)</answer>", flags=re.DOTALL)
_EXPRESSION = re.compile(r"[0-9+\-*/()\s]+")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
}


class Countdown(RewardFunction):
    """1 if the answer's expression equals the target and uses every number exactly once.

    The expression is in the last `<answer>…</answer>`, else on the last line. Text after an equals sign is not read.
    The ground truth holds `target` and `numbers`.
    """

    partial: float = Field(
        0.0,
        ge=0,
        le=1,
        description="reward of an expression with another value or other numbers; larger gives more for the form "
        "alone; TinyZero uses 0.1",
    )

    quick: ClassVar[bool] = True

    def check(self, task: Task) -> None:
        _read_problem(task)

    def __call__(self, task: Task, answer: str) -> float:
        target, numbers = _read_problem(task)
        result = evaluate_expression(_extract_expression(answer))
        if result is None:
            return 0.0
        value, used = result
        return 1.0 if value == target and used == Counter(numbers) else self.partial

    def extract(self, answer: str) -> str | None:
        """Return the expression without spaces."""
        expression = _extract_expression(answer)
        return None if evaluate_expression(expression) is None else "".join(expression.split())


def evaluate_expression(expression: str) -> tuple[Fraction, Counter[int]] | None:
    """Return the value of an expression of whole numbers and the count of each number; None if it is not one."""
    if len(expression) > MAX_EXPRESSION_CHARS or not _EXPRESSION.fullmatch(expression):
        return None
    used: Counter[int] = Counter()
    try:
        return _evaluate_node(ast.parse(expression.strip(), mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _evaluate_node(node: ast.expr, used: Counter[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            used[number] += 1
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluate_node(inner, used)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_evaluate_node(left, used), _evaluate_node(right, used))
    raise ValueError(f"{type(node).__name__} is not allowed in an expression of numbers")


def _extract_expression(answer: str) -> str:
    """Return the final expression of an answer, in Python's syntax."""
    sections = _SECTION.findall(answer)
    text = sections[-1] if sections else answer.rstrip().rpartition("\n")[2]
    return str(text).translate(_SIGNS).partition("=")[0].strip()


def _read_problem(task: Task) -> tuple[Any, list[Any]]:
    """Return the target and the numbers of a task."""
    truth: Any = task.fields.get("ground_truth")
    known = isinstance(truth, dict) and isinstance(truth.get("numbers"), list) and isinstance(truth.get("target"), int)
    if not known:
        raise DataError(
            f"The `ground_truth` of {describe_task(task)} is {truth!r}, and countdown needs a `target` and the "
            f"`numbers` to reach it with. `etude data prepare countdown` makes such tasks."
        )
    return truth["target"], truth["numbers"]
