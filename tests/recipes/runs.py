"""Whole runs for tests, through the command line in this process: a second each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from etude.checkpoint import CheckpointManager
from etude.cli import main
from etude.config.compose import compose
from etude.models import Model
from etude.recipes.collect.rollouts import StepGroups
from etude.recipes.run.builders.policy import load_policy
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_run
from etude.records import Sample
from etude.train import flops, load_weights

R = TypeVar("R", bound=BaseModel)
Captured = pytest.CaptureFixture[str]
REWARDS = "tests.recipes.rewards"
STEPS = 12
"""The steps of runs that are interrupted, and of the one they are compared with."""


def options(world: Path, **changes: Any) -> list[str]:
    """Return the options of a short run on sums; `collect__tasks` stands for `collect.tasks`, None leaves one out."""
    chosen: dict[str, Any] = {
        "model.path": world / "model",
        "data.train": f"[{world / 'tasks.jsonl'}]",
        "data.max_prompt_length": 16,
        "reward": "function",
        "reward.path": f"{REWARDS}:digits",
        "sampling.max_tokens": 6,
        "collect.tasks": 3,
        "collect.group_size": 4,
        "train.precision": "fp32",
        "train.learning_rate": 0.01,
        "steps": 2,
        "threads": 1,
        "observe.console": "off",
    }
    chosen |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in chosen.items() if value is not None]


def run_of(world: Path, **changes: Any) -> Run:
    """Return the composed run."""
    return composed(Run, tuple(options(world, **changes)))


@lru_cache(maxsize=64)
def composed(root: type[R], words: tuple[str, ...]) -> R:
    """Compose the options once for all tests with the same ones; composing takes a tenth of a second."""
    return compose(root, words)


def train(world: Path, directory: Path, *words: str, **changes: Any) -> Path:
    """Train a run to its end."""
    assert main(["train", *words, *options(world, directory=directory, **changes)]) == 0
    return directory


@contextmanager
def faster_in_bf16(speedup: float) -> Iterator[None]:
    """Have this processor compute so many times as fast in bf16 as in fp32, in its trial."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "measure_matmul_flops", lambda dtype, *_: speedup if dtype == torch.bfloat16 else 1.0)
        flops.measure_bf16_speedup.cache_clear()
        yield
    flops.measure_bf16_speedup.cache_clear()


def refused(capsys: Captured, *words: str) -> str:
    """Return the error of a command, and check that there is no traceback."""
    capsys.readouterr()
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message and "etude: " in message
    return message.partition("etude: ")[2]


def refused_run(capsys: Captured, world: Path, directory: Path, *words: str, **changes: Any) -> str:
    """Return the error of a run."""
    return refused(capsys, "train", *words, *options(world, directory=directory, **changes))


def rows_of(groups: StepGroups) -> list[Sample]:
    """Return the token sequences of a step in the journal."""
    return [sample for scored in groups.scored for sample in scored.samples_ref]


def step_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of each training step."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > 0]


def loaded(directory: Path, step: int | None = None) -> Model:
    """Return the model in a run's checkpoint of a step, or in its newest one."""
    model, _ = load_policy(read_run(directory))
    checkpoints = CheckpointManager(directory / "checkpoints")
    wanted = (
        checkpoints.newest()
        if step is None
        else {checkpoint.step: checkpoint for checkpoint in checkpoints.list_complete()}[step]
    )
    assert wanted is not None
    load_weights(model, checkpoints, wanted)
    return model


def weights(directory: Path, step: int | None = None) -> dict[str, Tensor]:
    """Return the weights of a run's checkpoint."""
    return {name: weight.detach() for name, weight in loaded(directory, step).named_weights()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether two models are equal, bit for bit."""
    return a.keys() == b.keys() and all(bool((a[name] == b[name]).all()) for name in a)


def at(tree: Any, path: str) -> object:
    """Return the value at a dotted path of a tree."""
    for part in path.split("."):
        tree = tree[part]
    return tree


def is_straight(directory: Path, straight: Path) -> None:
    """Assert that a run made each step once, and has the weights of a run without an interruption, bit for bit."""
    assert [step["step"] for step in step_metrics(directory)] == list(range(1, STEPS + 1))
    assert same(weights(directory), weights(straight))
