"""A run that is killed again and again trains on the same tasks as an uninterrupted one, and ends with the same
weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import CheckpointError
from etude.recipes.run.builders.assemble import build
from tests.chaos.scenario import POINTS, KillPoint, RunKiller, RunResult, make_world, random_kills, run_of

pytestmark = pytest.mark.xdist_group("kills")  # compared with one run that takes long


@pytest.fixture(scope="module")
def killer() -> RunKiller:
    """The object that starts and kills processes."""
    return RunKiller()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the tasks that every process starts from."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def uninterrupted(killer: RunKiller, world: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The run without a kill."""
    return killer.run_to_end(tmp_path_factory.mktemp("whole") / "run", world, [])


def test_the_run_covers_refills_and_trains_each_task_once(uninterrupted: RunResult) -> None:
    assert len(uninterrupted.tasks) == 36 and set(uninterrupted.tasks.values()) == {1}
    assert len(uninterrupted.issued) > 36, "the filter dropped nothing, so that there is no refill to lose"


@pytest.mark.smoke
def test_a_run_killed_once_equals_the_uninterrupted_one(
    killer: RunKiller, world: Path, uninterrupted: RunResult, tmp_path: Path
) -> None:
    """Killed between two checkpoints, after an update and before its publish."""
    result = killer.run_to_end(tmp_path / "run", world, [KillPoint("updated", 6)])
    assert result.kills == 1
    assert (result.tasks, result.issued, result.weights) == (
        uninterrupted.tasks,
        uninterrupted.issued,
        uninterrupted.weights,
    )


def test_a_run_killed_at_every_point_equals_the_uninterrupted_one(
    killer: RunKiller, world: Path, uninterrupted: RunResult, tmp_path: Path
) -> None:
    """Killed at every named point, and as often at any moment."""
    result = killer.run_to_end(tmp_path / "run", world, random_kills(2 * len(POINTS), 1, uninterrupted))
    assert result.kills >= 12
    assert result.tasks == uninterrupted.tasks
    assert result.issued == uninterrupted.issued
    assert result.weights == uninterrupted.weights


def test_so_is_one_that_saves_in_the_background(
    killer: RunKiller, world: Path, uninterrupted: RunResult, tmp_path: Path
) -> None:
    """Killed while a checkpoint is written, before it gets its name, and at any moment."""
    points = ("saved", "checkpoint.writing", "checkpoint.renaming", "updated", "checkpoint.renaming")
    kills = [KillPoint(point, count) for count, point in enumerate(points, 1)]
    options = {"checkpoint.async_save": "true", "checkpoint.every": 1}
    result = killer.run_to_end(tmp_path / "run", world, [*kills, 0.3 * uninterrupted.seconds], **options)
    assert result.kills >= 5
    assert (result.tasks, result.issued, result.weights) == (
        uninterrupted.tasks,
        uninterrupted.issued,
        uninterrupted.weights,
    )


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_leads_to_the_same_end(
    killer: RunKiller, world: Path, uninterrupted: RunResult, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    killer.run_once(directory, world, KillPoint("published", 10))
    newest = max((directory / "checkpoints").glob("step-*"), key=lambda path: path.name)
    shard = max(newest.glob("*.tensors"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=shard.name), build(run_of(directory, world)):
        pass
    result = killer.run_to_end(directory, world, [], **{"checkpoint.fall_back": "true"})
    assert result.weights == uninterrupted.weights and result.tasks == uninterrupted.tasks


def test_a_killed_run_with_an_environment_and_greedy_answers_equals_the_uninterrupted_one(
    killer: RunKiller, world: Path, tmp_path: Path
) -> None:
    """Killed within rollouts of many turns, and everywhere else."""
    options = {"env.path": "tests.chaos.scenario:UnreliableEnv", "advantage": "remax", "steps": 4, "data.val": "[]"}
    options |= {"evaluate.every": 0, "checkpoint.every": 2}
    uninterrupted = killer.run_to_end(tmp_path / "whole", world, [], **options)
    kills = [
        KillPoint("stepping", 5),
        KillPoint("admitted"),
        KillPoint("checkpoint.renaming"),
        KillPoint("stepping", 40),
    ]
    result = killer.run_to_end(tmp_path / "run", world, [*kills, 0.2 * uninterrupted.seconds], **options)
    assert result.kills >= 4
    assert (result.tasks, result.issued, result.weights) == (
        uninterrupted.tasks,
        uninterrupted.issued,
        uninterrupted.weights,
    )
