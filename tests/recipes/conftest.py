"""Fixtures of the tests of runs: one tiny model with its tasks, and runs that are trained once and only read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.players import TALKS
from tests.recipes.runs import STEPS, train
from tests.recipes.supervised_runs import learned, make_examples
from tests.worlds import make_model, make_tasks


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model`, `tasks.jsonl` and `held_out.jsonl`."""
    directory = tmp_path_factory.mktemp("sums")
    make_model(directory / "model")
    make_tasks(directory / "tasks.jsonl", 40)
    make_tasks(directory / "held_out.jsonl", 5, seed=1)
    return directory


@pytest.fixture(scope="session")
def splittable(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world with a model whose heads four ranks can split."""
    directory = tmp_path_factory.mktemp("splittable")
    make_model(directory / "model", heads=4, kv_heads=2)
    shutil.copy(world / "tasks.jsonl", directory)
    return directory


@pytest.fixture(scope="session")
def supervised_world(world: Path) -> Path:
    """The same directory with `teacher`, another model, and supervised examples."""
    make_model(world / "teacher", seed=1)
    make_examples(world)
    return world


@pytest.fixture(scope="session")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps without an interruption, to compare others with: it has the weights of each step. Only read
    it."""
    return train(world, tmp_path_factory.mktemp("whole") / "run", steps=4, checkpoint__every=1, checkpoint__keep=4)


@pytest.fixture(scope="session")
def paired(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a dozen steps by two ranks on this machine without an interruption, to compare others with."""
    return train(world, tmp_path_factory.mktemp("paired") / "run", ranks=2, steps=STEPS)


@pytest.fixture(scope="session")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that was scored every other step. Only read it."""
    return train(
        world,
        tmp_path_factory.mktemp("trained") / "run",
        steps=4,
        data__val=f"[{world / 'held_out.jsonl'}]",
        evaluate__every=2,
        evaluate__samples=2,
        evaluate__sampling__max_tokens=6,
        reward__path="tests.recipes.rewards:in_parts",
    )


@pytest.fixture(scope="session")
def talked(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps by an agent, without an interruption. Only read it."""
    return train(world, tmp_path_factory.mktemp("talked") / "run", **TALKS | {"steps": 2})


@pytest.fixture(scope="session")
def finished(supervised_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs of three steps without an interruption, one of each supervised recipe. Only read them."""
    done: dict[str, Path] = {}

    def run(recipe: str) -> Path:
        if recipe not in done:
            done[recipe] = learned(recipe, supervised_world, tmp_path_factory.mktemp(recipe) / "run", steps=3)
        return done[recipe]

    return run
