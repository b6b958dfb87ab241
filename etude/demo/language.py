"""`etude demo`: a small language model with random weights becomes better than its unreliable teacher.

Everything after the warm-up is what `etude train` does, and writes a normal run directory: it can be resumed,
evaluated, sampled, plotted and exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from etude.demo import sorting_model, sorting_task
from etude.demo.answers_demo import AnswersDemo, run_answers_demo
from etude.demo.demo_setup import LANGUAGE_DEMO
from etude.recipes.evaluate import EvaluatedAnswer

_PROMPT, _ANSWER = sorting_task.prompt_of("582134"), sorting_task.answer_to("582134")
INTRODUCTION = "\n".join(
    (
        f"The task: put {sorting_task.DIGITS} digits in order. The answer to `{_PROMPT}` is `{_ANSWER}`.",
        f"First a model with random weights imitates a teacher that sorts in reverse order "
        f"{1 - sorting_task.TEACHER_RIGHT:.0%} of the time.",
        "Then it improves by GRPO: it samples answers, and right ones have reward 1. Nothing is downloaded.",
    )
)


def run_demo(overrides: Sequence[str], file: Path | None = None, began: float | None = None) -> dict[str, Any]:
    """Run the demo, and return its result; see `run_answers_demo`."""
    demo = AnswersDemo(
        spec=LANGUAGE_DEMO,
        introduction=INTRODUCTION,
        counts={"train": 20_000, "held_out": 500},
        make_rows=sorting_task.make_rows,
        warm_up=sorting_model.warm_up,
        steps=sorting_model.STEPS,
        head_dim=sorting_model.HEAD_DIM,
        shown=5,
        describe=_describe,
        next_commands={
            'ETUDE generate RUN "sort 582134:" -n 4': "sample answers from the model",
            "ETUDE demo seed=1 loss=gspo": "the same demo with another seed and loss",
        },
    )
    return run_answers_demo(demo, overrides, file, began)


def _describe(seed: int, answer: EvaluatedAnswer) -> tuple[Text, str]:
    del seed
    problem = str(answer.prompt).removeprefix("sort ").removesuffix(":")
    return Text(problem), sorting_task.answer_to(problem)
