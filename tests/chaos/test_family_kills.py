"""Runs of families with layers of transformers: they learn, train on policy, and resume to the bit after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.scenario import KillPoint, RunKiller
from tests.families import make_family
from tests.recipes.runs import same, step_metrics, weights
from tests.worlds import make_tasks

pytestmark = pytest.mark.xdist_group("family kills")

STEPS = 10
WIDE: dict[str, Any] = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
"""Heads of a width at which an answer has the same bits in every batch."""
OPTIONS: dict[str, Any] = {
    "reward.path": "tests.recipes.rewards:digits",
    "data.val": "[]",
    "evaluate.every": 0,
    "collect.refill": 0,
    "threads": 1,
    "steps": STEPS,
    "train.learning_rate": 0.03,
}


@pytest.fixture(scope="module")
def killer() -> RunKiller:
    """The object that starts and kills processes."""
    return RunKiller()


def make_world(directory: Path, name: str, **sizes: Any) -> Path:
    """Create a model of a family, and tasks."""
    make_family(directory / "model", name, **sizes)
    make_tasks(directory / "tasks.jsonl", 40)
    return directory


def check_killed_run(killer: RunKiller, world: Path, kill: KillPoint, **changes: Any) -> None:
    """Check that a run which is killed once learns what an uninterrupted one learns, and samples what it trains on."""
    whole, killed, options = world / "whole", world / "killed", OPTIONS | changes
    assert killer.run_once(whole, world, KillPoint(), **options)
    assert not killer.run_once(killed, world, kill, **options)
    assert killer.run_once(killed, world, KillPoint(), **options)
    steps = step_metrics(killed)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert same(weights(killed), weights(whole))
    assert max(step["mismatch/k3"] for step in steps) < 1e-9
    assert sum(step["reward"] for step in steps[-3:]) > 1.5 * sum(step["reward"] for step in steps[:3])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("qwen3_5_text", WIDE), ("gpt_oss", {}), ("gemma4_text", {}), ("nemotron_h", {})],
)
def test_a_killed_run_learns_what_an_uninterrupted_one_learns(
    name: str, sizes: dict[str, Any], killer: RunKiller, tmp_path: Path
) -> None:
    """Killed while it samples, after a step that has no checkpoint."""
    world = make_world(tmp_path, name, **sizes)
    check_killed_run(killer, world, KillPoint("streaming", 400))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_5_text", WIDE),
        ("nemotron_h", {}),
        pytest.param("gpt_oss", {}, marks=pytest.mark.soak),
        pytest.param("gemma4_text", {}, marks=pytest.mark.soak),
    ],
)
def test_so_do_two_ranks_that_divide_the_weights(
    name: str, sizes: dict[str, Any], killer: RunKiller, tmp_path: Path
) -> None:
    """Killed between an update and its publish."""
    world = make_world(tmp_path, name, **sizes)
    divided = {"ranks": 2, "train.engine": "fsdp"}
    check_killed_run(killer, world, KillPoint("updated", 6), **divided)
