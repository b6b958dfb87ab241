"""`etude demo vision`: a small vision-language model with random weights learns to count shapes in pictures.

Its vision tower is trained too. Everything after the warm-up is what `etude train` does with a vision-language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.text import Text

from etude.demo import counting_model, counting_task
from etude.demo.answers_demo import AnswersDemo, run_answers_demo
from etude.demo.demo_setup import VISION_DEMO
from etude.recipes.evaluate import EvaluatedAnswer

COUNTS = {"train": 2_000, "held_out": 200}
INTRODUCTION = "\n".join(
    (
        f"The task: count the squares, or the circles, of a picture of {counting_task.SIDE} × {counting_task.SIDE} "
        f"pixels. There are 1 to {counting_task.MOST} of each.",
        "First a vision-language model with random weights imitates a teacher that guesses "
        f"{1 - counting_model.TEACHER_KNOWS:.0%} of the time.",
        "Then it improves by GRPO: it looks and samples answers, and right ones have reward 1. Nothing is downloaded.",
    )
)
SIGNS = {counting_task.SQUARES: "■", counting_task.CIRCLES: "●"}


def run_demo(overrides: Sequence[str], file: Path | None = None, began: float | None = None) -> dict[str, Any]:
    """Run the demo, and return its result; see `run_answers_demo`."""
    demo = AnswersDemo(
        spec=VISION_DEMO,
        introduction=INTRODUCTION,
        counts=COUNTS,
        make_rows=counting_task.make_rows,
        warm_up=counting_model.warm_up,
        steps=counting_model.STEPS,
        head_dim=counting_model.HEAD_DIM,
        shown=4,
        describe=_describe,
        next_commands={"ETUDE demo vision seed=1 vision.train=false": "the same demo with a frozen vision tower"},
    )
    return run_answers_demo(demo, overrides, file, began)


def _describe(seed: int, answer: EvaluatedAnswer) -> tuple[Text, str]:
    """Return the picture as signs, with its question, and the right answer."""
    puzzle = next(islice(counting_task.puzzles(seed, held_out=True), answer.task, None))
    shapes = {(shape.row, shape.column): shape for shape in puzzle.shapes}
    problem = Text()
    for row in range(counting_task.PER_SIDE):
        for column in range(counting_task.PER_SIDE):
            shape = shapes.get((row, column))
            problem.append("· " if shape is None else f"{SIGNS[shape.kind]} ", "dim" if shape is None else shape.colour)
        problem.append("\n")
    return problem.append(puzzle.question), str(puzzle.answer)
