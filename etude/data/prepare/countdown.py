"""Countdown: random problems to reach a target with given numbers, as in TinyZero (github.com/Jiayi-Pan/TinyZero)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Annotated, ClassVar, Literal

import pyarrow as pa
from pydantic import Field

from etude.data.prepare.base import PromptPreparation, RandomInt, Row, SyntheticPreparation

SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


class CountdownPreparation(SyntheticPreparation, PromptPreparation):
    """Numbers, and a target that some expression of all of them equals: `extra_info.solution` is one.

    A problem is drawn as its solution, in which every intermediate result is a whole number above 0.
    """

    prompt: str = Field(
        "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
        "({operations}) and each number must be used exactly once. Show your work in <think> </think> tags. And return "
        "the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.",
        description="text of the prompt; {numbers}, {target} and {operations} are the problem",
    )
    numbers: tuple[Annotated[int, Field(ge=2, le=8)], ...] = Field(
        (3, 4), min_length=1, description="possible counts of numbers in a problem, all equally likely; more is harder"
    )
    max_number: int = Field(99, ge=1, description="largest number of a problem")
    max_target: int = Field(100, ge=1, description="largest target of a problem")
    operations: tuple[Literal["add", "subtract", "multiply", "divide"], ...] = Field(
        ("add", "subtract", "multiply", "divide"), min_length=1, description="operations of the solutions"
    )

    title: ClassVar[str] = "countdown"
    reward_name: ClassVar[str] = "countdown"
    published_name: ClassVar[str] = "countdown"
    placeholders: ClassVar[tuple[str, ...]] = ("numbers", "target")
    ground_truth_type: ClassVar[pa.DataType] = pa.struct([("target", pa.int64()), ("numbers", pa.list_(pa.int64()))])
    extra_info_fields: ClassVar[Mapping[str, pa.DataType]] = {"solution": pa.string()}

    def make_problem(self, draw: RandomInt) -> tuple[Hashable, Row | None]:
        numbers = [draw(1, self.max_number) for _ in range(self.numbers[draw(0, len(self.numbers) - 1)])]
        parts = [(number, str(number)) for number in numbers]
        while len(parts) > 1:
            left, right = (parts.pop(draw(0, len(parts) - 1)) for _ in range(2))
            sign = SIGNS[self.operations[draw(0, len(self.operations) - 1)]]
            value = _combine(left[0], sign, right[0])
            if value is None:
                return (), None
            parts.append((value, f"({left[1]} {sign} {right[1]})"))
        ((target, solution),) = parts
        if target > self.max_target:
            return (), None
        row = self.make_row(
            {"target": target, "numbers": numbers},
            {"solution": solution.removeprefix("(").removesuffix(")")},
            numbers=str(numbers),
            target=str(target),
            operations=", ".join(SIGNS[name] for name in self.operations),
        )
        return (target, *sorted(numbers)), row


def _combine(left: int, sign: str, right: int) -> int | None:
    """Return the result of an operation, or None if it is not a whole number above 0."""
    if sign == "/":
        return left // right if left % right == 0 else None
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return value if value > 0 else None
