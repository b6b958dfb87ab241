"""Whole supervised runs for tests, through the command line in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.checkpoint import CheckpointManager
from etude.cli import main
from etude.models import Model
from etude.recipes.registry import SUPERVISED, read_recipe_class
from etude.recipes.run.builders.policy import load_policy
from etude.recipes.run.directory import read_recipe
from etude.recipes.supervised.config import SupervisedRun
from etude.train import load_weights
from tests.recipes.runs import Captured, composed, refused

RECIPES = tuple(SUPERVISED)


class Killed(BaseException):
    """The exception that ends a run, because nothing catches it."""


def in_test(*names: str, kept: str = "") -> pytest.MarkDecorator:
    """Return the recipes: `make test` has these, `make integration` the others, and `make check` keeps one."""
    marks = {name: pytest.mark.integration for name in RECIPES if name not in names} | {kept: pytest.mark.kept}
    return pytest.mark.parametrize("recipe", [pytest.param(name, marks=marks.get(name, ())) for name in RECIPES])


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as lines of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sums(seed: int = 0) -> list[dict[str, str]]:
    """Return every sum of two digits with its result, shuffled."""
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(rows)
    return rows


def pairs(seed: int = 0) -> list[dict[str, str]]:
    """Return the same, with a second answer that is off by one."""
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": str(int(row["completion"]) + 1)}
        for row in sums(seed)
    ]


def make_examples(directory: Path) -> None:
    """Write `shown.jsonl` and `pairs.jsonl` to train on, and held-out ones with `held_out_` before the name."""
    for name, rows in (("shown", sums()), ("pairs", pairs())):
        write(directory / f"{name}.jsonl", rows[:40])
        write(directory / f"held_out_{name}.jsonl", rows[80:])


def options(recipe: str, world: Path, **changes: Any) -> list[str]:
    """Return the options of a short run; `train__warmup_steps` stands for `train.warmup_steps`, None leaves one out."""
    of_pairs = recipe in ("dpo", "reward-model")
    chosen: dict[str, Any] = {
        "model.path": world / "model",
        "data.train": f"[{world / ('pairs.jsonl' if of_pairs else 'shown.jsonl')}]",
        "train.precision": "fp32",
        "train.learning_rate": 0.003,
        "batch_size": 8,
        "steps": 2,
        "threads": 1,
        "observe.console": "off",
    }
    chosen |= {"teacher.path": world / "teacher", "teacher.top": 8} if recipe == "distill" else {}
    chosen |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in chosen.items() if value is not None]


def run_of(recipe: str, world: Path, **changes: Any) -> SupervisedRun:
    """Return the composed run."""
    return composed(SUPERVISED[recipe], tuple(options(recipe, world, **changes)))


def learned(recipe: str, world: Path, directory: Path, **changes: Any) -> Path:
    """Train a run to its end."""
    assert main([recipe, *options(recipe, world, directory=directory, **changes)]) == 0
    return directory


def refusal(capsys: Captured, recipe: str, world: Path, directory: Path, **changes: Any) -> str:
    """Return the error of a run; check that it leaves no file."""
    message = refused(capsys, recipe, *options(recipe, world, directory=directory, **changes))
    assert not directory.exists(), "a run that cannot begin leaves no directory"
    return message


def began(directory: Path) -> dict[str, Any]:
    """Return the weights that a run began with."""
    model, _ = load_policy(read_recipe(read_recipe_class(directory), directory))
    return {name: weight.detach() for name, weight in model.named_weights()}


def loaded(directory: Path) -> Model:
    """Return the model in a run's newest checkpoint."""
    model, _ = load_policy(read_recipe(read_recipe_class(directory), directory))
    checkpoints = CheckpointManager(directory / "checkpoints")
    newest = checkpoints.newest()
    assert newest is not None
    load_weights(model, checkpoints, newest)
    return model


def weights(directory: Path) -> dict[str, Any]:
    """Return the weights of a run's newest checkpoint."""
    return {name: weight.detach() for name, weight in loaded(directory).named_weights()}


def stopping(verb: Callable[..., Any], error: BaseException, after: int) -> Callable[..., Any]:
    """Return a function that ends the run when it is called more often than allowed."""
    calls = iter(range(after + 1))

    def act(*arguments: Any) -> Any:
        if next(calls) == after:
            raise error
        return verb(*arguments)

    return act


def dying(learner: Any, after: int) -> Any:
    """A learner that ends the run at an update, after so many of them."""

    class Dying:
        def __getattr__(self, name: str) -> Any:
            return getattr(learner, name)

    mortal = Dying()
    mortal.update = stopping(learner.update, Killed(), after)  # type: ignore[attr-defined]
    return mortal
