"""`etude demo`: a small language model with random weights becomes better than its unreliable teacher.

Everything after the warm-up is what `etude train` does, and writes a normal run directory: it can be resumed,
evaluated, sampled, plotted and exported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.demo import sorting_task
from etude.demo.demo_setup import LANGUAGE_DEMO, compose_demo, create_world, print_conclusion
from etude.demo.sorting_model import HEAD_DIM, STEPS, warm_up
from etude.observe import make_console, progress
from etude.recipes.evaluate import EvaluatedAnswer
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.loop import run_loop
from etude.recipes.run.rules.checks import find_warnings
from etude.recipes.run.steps.components import RunComponents
from etude.tools.plot import plot

TASKS, SHOWN = {"train": 20_000, "held_out": 500}, 5


@dataclass(frozen=True)
class Scores:
    """The accuracy of a model on held-out problems."""

    sampled: float
    """The accuracy at temperature 1."""
    greedy: float
    """The accuracy of greedy answers."""
    answers: Sequence[EvaluatedAnswer]


def run_demo(overrides: Sequence[str], file: Path | None = None, began: float | None = None) -> dict[str, Any]:
    """Create tasks and a model, train the model, print the progress, and return the result.

    began: a reading of `time.perf_counter` at the start of the program, so that import time counts too.
    """
    run = compose_demo(LANGUAGE_DEMO, overrides, file)
    find_warnings(run)  # refuses a run that cannot work before the warm-up
    directory = run.directory
    assert directory is not None, "a demo has a directory"
    console = make_console(run.observe.console)
    began = time.perf_counter() if began is None else began
    _introduce(console)
    torch.set_num_threads(run.threads or torch.get_num_threads())
    create_world(run, console, TASKS, sorting_task.make_rows, warm_up, steps=STEPS, head_dim=HEAD_DIM)
    warm_up_seconds = time.perf_counter() - began
    with build(run) as parts:
        parts.publish(parts.checkpoint.step)
        before = _scored(parts, console)
        console.print(Text(f"\nWarmed up in {warm_up_seconds:.0f} s. Now {run.steps} steps of GRPO.\n"))
        run_loop(parts)
        after = _scored(parts, console)
    seconds = time.perf_counter() - began
    _compare(console, before, after)
    plot([directory], ["reward"], console)
    next_commands = {
        'ETUDE generate RUN "sort 582134:" -n 4': "sample answers from the model",
        "ETUDE view RUN": "show the run in a web browser",
        "ETUDE answers RUN": "print the answers of the last step",
        "ETUDE eval RUN evaluate.samples=4": "evaluate it with several answers a problem",
        f"ETUDE train --resume RUN steps={2 * run.steps}": "train for as many steps again",
        "ETUDE export RUN my-model": "write a Hugging Face model",
        "ETUDE demo seed=1 loss=gspo": "the same demo with another seed and loss",
    }
    print_conclusion(console, directory, seconds, next_commands)
    steps = read_metrics(directory)
    return {
        "accuracy_before": before.sampled,
        "accuracy_after": after.sampled,
        "greedy_before": before.greedy,
        "greedy_after": after.greedy,
        "seconds": seconds,
        "sft_seconds": warm_up_seconds,
        "rl_steps": len(steps),
        "tokens_per_second": sum(step["tokens"] for step in steps) / sum(step["time/step"] for step in steps),
        "run_dir": str(directory),
    }


def _scored(parts: RunComponents, console: Console) -> Scores:
    """Return the policy's accuracy on held-out problems, sampled and greedy."""
    evaluator = parts.evaluate.evaluator
    assert evaluator is not None
    with progress("scoring on held-out problems", 2 * evaluator.tasks * evaluator.samples, console) as bar:
        # Not those of the run, which are recorded: the model is asked before the training and after it.
        sampled = evaluator.with_sampling().answer_all(bar.advance, step=0)
        greedy = evaluator.with_sampling(temperature=0.0).answer_all(bar.advance, step=0)
    accuracy, greedy_accuracy = (fmean(answer.reward for answer in answers) for answers in (sampled, greedy))
    return Scores(accuracy, greedy_accuracy, sampled)


# -- output -----------------------------------------------------------------------------------------------------------


def _introduce(console: Console) -> None:
    prompt, answer = sorting_task.prompt_of("582134"), sorting_task.answer_to("582134")
    lines = (
        f"The task: put {sorting_task.DIGITS} digits in order. The answer to `{prompt}` is `{answer}`.",
        f"First a model with random weights imitates a teacher that sorts in reverse order "
        f"{1 - sorting_task.TEACHER_RIGHT:.0%} of the time.",
        "Then it improves by GRPO: it samples answers, and right ones have reward 1. Nothing is downloaded.",
    )
    console.print(Text("\n".join(lines) + "\n"), soft_wrap=True)


def _compare(console: Console, before: Scores, after: Scores) -> None:
    table = Table("problem", "right answer", "before", "after", title="Held-out problems, one sampled answer each")
    for old, new in list(zip(before.answers, after.answers, strict=True))[:SHOWN]:
        problem = str(new.prompt).removeprefix("sort ").removesuffix(":")
        cells = [Text(answer.text, "green" if answer.reward else "red") for answer in (old, new)]
        table.add_row(problem, sorting_task.answer_to(problem), *cells)
    console.print()
    console.print(table)
    for name, old_score, new_score in (
        ("sampled at temperature 1", before.sampled, after.sampled),
        ("greedy", before.greedy, after.greedy),
    ):
        line = Text.assemble(f"held-out accuracy, {name:<25}", f"{old_score:6.1%}  →  ", (f"{new_score:.1%}", "bold"))
        console.print(line, soft_wrap=True)
