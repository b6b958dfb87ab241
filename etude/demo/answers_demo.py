"""The shared part of the demos whose tasks have one right answer: warm up, score, train, score again, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.demo.demo_setup import DemoSpec, compose_demo, create_world, print_conclusion
from etude.observe import make_console, progress
from etude.recipes.evaluate import EvaluatedAnswer
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.loop import run_loop
from etude.recipes.run.rules.checks import find_warnings
from etude.recipes.run.steps.components import RunComponents
from etude.tools.plot import plot


@dataclass(frozen=True)
class AnswersDemo:
    """A demo: its tasks, its model, and what it prints."""

    spec: DemoSpec
    introduction: str
    """The lines that it begins with."""
    counts: Mapping[str, int]
    """The numbers of tasks in `train` and `held_out`."""
    make_rows: Callable[..., Iterable[Mapping[str, Any]]]
    """Returns so many tasks, from a seed."""
    warm_up: Callable[..., object]
    """Creates the model; see `create_world`."""
    steps: int
    """The steps of the warm-up."""
    head_dim: int
    shown: int
    """The number of held-out tasks that it prints."""
    describe: Callable[[int, EvaluatedAnswer], tuple[Text, str]]
    """Returns a held-out task and its right answer, from the run's seed and an answer to it."""
    next_commands: dict[str, str]
    """Commands of this demo to try next, after those of every run."""


@dataclass(frozen=True)
class _Scores:
    """The accuracy of a model on held-out tasks."""

    sampled: float
    """The accuracy at temperature 1."""
    greedy: float
    """The accuracy of greedy answers."""
    answers: Sequence[EvaluatedAnswer] = field(repr=False)


def run_answers_demo(
    demo: AnswersDemo, overrides: Sequence[str], file: Path | None = None, began: float | None = None
) -> dict[str, Any]:
    """Create tasks and a model, train the model, print the progress, and return the result.

    began: a reading of `time.perf_counter` at the start of the program, so that import time counts too.
    """
    run = compose_demo(demo.spec, overrides, file)
    find_warnings(run)  # refuses a run that cannot work before the warm-up
    directory = run.directory
    assert directory is not None, "a demo has a directory"
    console = make_console(run.observe.console)
    began = time.perf_counter() if began is None else began
    console.print(Text(f"{demo.introduction}\n"), soft_wrap=True)
    torch.set_num_threads(run.threads or torch.get_num_threads())
    create_world(run, console, demo.counts, demo.make_rows, demo.warm_up, steps=demo.steps, head_dim=demo.head_dim)
    warm_up_seconds = time.perf_counter() - began
    with build(run) as parts:
        parts.publish(parts.checkpoint.step)
        before = _scored(parts, console)
        console.print(Text(f"\nWarmed up in {warm_up_seconds:.0f} s. Now {run.steps} steps of GRPO.\n"))
        run_loop(parts)
        after = _scored(parts, console)
    seconds = time.perf_counter() - began
    _compare(demo, run.seed, console, before, after)
    plot([directory], ["reward"], console)
    next_commands = {
        "ETUDE view RUN": "show the run in a web browser",
        "ETUDE answers RUN": "print the answers of the last step",
        "ETUDE eval RUN evaluate.samples=4": "evaluate it with several answers a problem",
        f"ETUDE train --resume RUN steps={2 * run.steps}": "train for as many steps again",
        "ETUDE export RUN my-model": "write a Hugging Face model",
    }
    print_conclusion(console, directory, seconds, next_commands | demo.next_commands)
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


def _scored(parts: RunComponents, console: Console) -> _Scores:
    """Return the policy's accuracy on held-out problems, sampled and greedy."""
    evaluator = parts.evaluate.evaluator
    assert evaluator is not None
    with progress("scoring on held-out problems", 2 * evaluator.tasks * evaluator.samples, console) as bar:
        # Not those of the run, which are recorded: the model is asked before the training and after it.
        sampled = evaluator.with_sampling().answer_all(bar.advance, step=0)
        greedy = evaluator.with_sampling(temperature=0.0).answer_all(bar.advance, step=0)
    accuracy, greedy_accuracy = (fmean(answer.reward for answer in answers) for answers in (sampled, greedy))
    return _Scores(accuracy, greedy_accuracy, sampled)


def _compare(demo: AnswersDemo, seed: int, console: Console, before: _Scores, after: _Scores) -> None:
    table = Table("problem", "right answer", "before", "after", title="Held-out problems, one sampled answer each")
    for old, new in list(zip(before.answers, after.answers, strict=True))[: demo.shown]:
        problem, right = demo.describe(seed, new)
        cells = [Text(answer.text, "green" if answer.reward else "red") for answer in (old, new)]
        table.add_row(problem, right, *cells)
    console.print()
    console.print(table)
    for name, old_score, new_score in (
        ("sampled at temperature 1", before.sampled, after.sampled),
        ("greedy", before.greedy, after.greedy),
    ):
        line = Text.assemble(f"held-out accuracy, {name:<25}", f"{old_score:6.1%}  →  ", (f"{new_score:.1%}", "bold"))
        console.print(line, soft_wrap=True)
