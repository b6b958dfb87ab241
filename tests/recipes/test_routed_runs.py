"""Runs that replay the sampler's experts: over several turns, by an environment and by agents, and after a resume."""

from __future__ import annotations

import math
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.recipes.run.builders.assemble import build
from etude.records import Turn
from etude.store import open_store
from tests.families import make_family
from tests.recipes import partners, players
from tests.recipes.runs import rows_of, run_of, step_metrics, train

REPLAYED: dict[str, Any] = {"train.router_replay": "r3", "mini_batches": 2, "steps": 1}
ECHO = {
    "env.path": f"{partners.__name__}:Echo",
    "env.kwargs.turns": 2,
    "reward": "environment",
    "reward.path": None,
}


@pytest.fixture(scope="module")
def mixture(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts, and tasks."""
    directory = tmp_path_factory.mktemp("mixture")
    make_family(directory / "model", "qwen3_moe")
    shutil.copy(world / "tasks.jsonl", directory)
    return directory


def turns_of(run: Path) -> list[list[Turn]]:
    """Return the turns of each rollout."""
    with closing(open_store(run / "journal.sqlite", read_only=True)) as store:
        return [list(store.turns(id)) for id in range(12)]


def check_records(turns: list[Turn]) -> None:
    """Check that a turn records the tokens that it computes anew, also the last one of the answer before."""
    before = np.empty(0, np.int32)
    for turn in turns:
        continues = len(before) > 0 and np.array_equal(turn.prompt[: len(before)], before)
        routes = turn.completion.routes
        assert routes is not None and routes.start == (len(before) - 1 if continues else 0)
        before = np.concatenate([turn.prompt, turn.completion.ids])
        assert routes.start + len(routes.experts) == len(before) - 1


@pytest.mark.slow
def test_rollouts_of_an_environment_are_replayed_also_after_a_resume(mixture: Path, tmp_path: Path) -> None:
    run = run_of(mixture, directory=tmp_path / "run", **REPLAYED, **ECHO)
    with build(run) as parts:
        parts.begin()
        before = parts.source.next(1)
    with build(run) as parts:
        after = parts.source.next(1)
    assert after.replayed
    for a, b in zip(rows_of(before), rows_of(after), strict=True):
        assert a.routes is not None and b.routes is not None and (a.routes == b.routes).all()
        assert (a.routes[:-1] < 4).all() and (a.routes[-1] == 255).all()
    for turns in turns_of(tmp_path / "run"):
        check_records(turns)


@pytest.mark.slow
def test_so_are_the_rollouts_of_agents(mixture: Path, tmp_path: Path) -> None:
    run = train(mixture, tmp_path / "run", **players.TALKS | REPLAYED)
    assert all(math.isfinite(step["grad_norm"]) for step in step_metrics(run))
    for turns in turns_of(run):
        check_records(turns)
