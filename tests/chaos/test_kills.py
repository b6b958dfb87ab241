"""A run that is killed again and again trains on the same tasks as one that never was, and its weights are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import CheckpointError
from etude.recipes.run.build import build
from tests.chaos.scenario import POINTS, Life, Story, Theatre, make_world, run_of, some_ends

pytestmark = pytest.mark.xdist_group("kills")  # which are held to one run that takes long


@pytest.fixture(scope="module")
def theatre() -> Theatre:
    """Where lives are started."""
    return Theatre()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the tasks."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def whole(theatre: Theatre, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The run that nobody killed."""
    return theatre.play(tmp_path_factory.mktemp("whole") / "run", world, [])


def test_the_run_itself_has_something_to_lose(whole: Story) -> None:
    assert len(whole.tasks) == 36 and set(whole.tasks.values()) == {1}
    assert len(whole.issued) > 36, "the filter dropped nothing, so that there is no refill to lose"


@pytest.mark.smoke
def test_one_kill_and_the_run_is_the_run_bit_for_bit(
    theatre: Theatre, world: Path, whole: Story, tmp_path: Path
) -> None:
    """Killed between two checkpoints, after an update and before its publish."""
    result = theatre.play(tmp_path / "run", world, [Life("updated", 6)])
    assert result.kills == 1
    assert (result.tasks, result.issued, result.weights) == (whole.tasks, whole.issued, whole.weights)


def test_a_killed_run_is_the_run_bit_for_bit(theatre: Theatre, world: Path, whole: Story, tmp_path: Path) -> None:
    """Killed at every named point, and as often at any moment."""
    result = theatre.play(tmp_path / "run", world, some_ends(2 * len(POINTS), 1, whole))
    assert result.kills >= 12
    assert result.tasks == whole.tasks
    assert result.issued == whole.issued
    assert result.weights == whole.weights


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_leads_to_the_same_end(
    theatre: Theatre, world: Path, whole: Story, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    theatre.live(directory, world, Life("published", 10))
    newest = max((directory / "checkpoints").glob("step-*"), key=lambda path: path.name)
    shard = max(newest.glob("*.tensors"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=shard.name), build(run_of(directory, world)):
        pass
    result = theatre.play(directory, world, [], **{"checkpoint.fall_back": "true"})
    assert result.weights == whole.weights and result.tasks == whole.tasks


def test_so_is_one_with_an_environment_that_compares_with_greedy_answers(
    theatre: Theatre, world: Path, tmp_path: Path
) -> None:
    """Killed amid rollouts of many turns, and everywhere else."""
    options = {"env.path": "tests.chaos.scenario:Moody", "advantage": "remax", "steps": 4, "data.val": "[]"}
    options |= {"evaluate.every": 0, "checkpoint.every": 2}
    whole = theatre.play(tmp_path / "whole", world, [], **options)
    ends = [Life("stepping", 5), Life("admitted"), Life("checkpoint.renaming"), Life("stepping", 40)]
    result = theatre.play(tmp_path / "run", world, [*ends, 0.2 * whole.seconds], **options)
    assert result.kills >= 4
    assert (result.tasks, result.issued, result.weights) == (whole.tasks, whole.issued, whole.weights)
