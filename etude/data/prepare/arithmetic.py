"""Arithmetic: random sums, differences and products of whole numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import ClassVar, Literal

from pydantic import Field

from etude.data.prepare.base import PromptPreparation, RandomInt, Row, SyntheticPreparation

SIGNS = {"add": "+", "subtract": "-", "multiply": "*"}


class ArithmeticPreparation(SyntheticPreparation, PromptPreparation):
    """Problems such as `57 + 68 - 3`. Products come before sums, and the result is the ground truth."""

    prompt: str = Field(
        'What is {question}? Let\'s think step by step and output the final answer after "####".',
        description="text of the prompt; {question} is the expression",
    )
    operations: tuple[Literal["add", "subtract", "multiply"], ...] = Field(
        ("add", "subtract"), min_length=1, description="operations between the numbers, all equally likely"
    )
    digits: int = Field(2, ge=1, le=12, description="most digits of a number; more is harder")
    terms: int = Field(2, ge=2, le=12, description="numbers in an expression; more is harder")

    title: ClassVar[str] = "arithmetic"
    published_name: ClassVar[str] = "arithmetic"

    @property
    def reward(self) -> str:
        return "gsm8k" if "####" in self.prompt else "exact_match"

    def make_problem(self, draw: RandomInt) -> tuple[Hashable, Row | None]:
        numbers = [draw(0, 10**self.digits - 1) for _ in range(self.terms)]
        signs = [SIGNS[self.operations[draw(0, len(self.operations) - 1)]] for _ in numbers[1:]]
        expression = str(numbers[0]) + "".join(f" {sign} {n}" for sign, n in zip(signs, numbers[1:], strict=True))
        return expression, self.make_row(str(_evaluate(numbers, signs)), {}, question=expression)


def _evaluate(numbers: Sequence[int], signs: Sequence[str]) -> int:
    """Return the value of an expression: first the products, then their sums and differences."""
    products: list[list[int]] = [[numbers[0]]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            products[-1].append(number)
        else:
            products.append([1 if sign == "+" else -1, number])
    return sum(map(prod, products))
