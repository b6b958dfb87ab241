"""When a run saves, what a checkpoint holds, and that going on from it is going on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.checkpoint import Checkpoints
from etude.cli import main
from etude.recipes.build import build
from etude.recipes.loop import practise
from etude.recipes.parts import Parts
from etude.recipes.saving import Saver
from tests.recipes.runs import Captured, measured, run_of, same, train, weights


@contextmanager
def saver(world: Path, directory: Path, **changes: Any) -> Iterator[tuple[Saver, Parts]]:
    """The saver of a run, among its parts."""
    with build(run_of(world, directory=directory, **changes)) as parts:
        yield parts.checkpoint, parts


def steps_kept(directory: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return [kept.step for kept in Checkpoints(directory / "checkpoints").kept()]


def test_it_saves_every_so_often_and_after_the_last_step(world: Path, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", steps=5, **{"checkpoint.every": 2, "checkpoint.keep": 9})
    assert steps_kept(run) == [2, 4, 5]
    assert steps_kept(train(world, tmp_path / "two", steps=5, **{"checkpoint.every": 1})) == [4, 5]


def test_a_new_best_is_saved_and_stays(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path, steps=9, **{"checkpoint.every": 100, "checkpoint.keep": 1}) as (saving, _):
        scores = {1: 0.2, 2: 0.5, 3: 0.5, 4: 0.4}
        saving.best = scores.get
        for step in range(1, 7):
            saving.maybe_save(step)
        assert not {3, 4, 5, 6} & set(steps_kept(tmp_path)), "an equal score is no better one"
        saving.save(7)
        best = saving.checkpoints.best()
        assert steps_kept(tmp_path) == [2, 7] and best is not None and best.step == 2


def test_who_asks_to_stop_gets_a_checkpoint_of_the_step_that_was_finished(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path, steps=9, **{"checkpoint.every": 100}) as (saving, _):
        steps = saving.remaining()
        assert [next(steps), next(steps)] == [1, 2]
        saving.maybe_save(2)
        assert steps_kept(tmp_path) == []
        saving.interrupt.asked = True
        assert list(steps) == [] and steps_kept(tmp_path) == [2]
        saving.interrupt.asked = False


def test_nothing_is_saved_of_a_run_that_made_no_step(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path) as (saving, _):
        saving.interrupt.asked = True
        assert list(saving.remaining()) == [] and steps_kept(tmp_path) == []
        saving.interrupt.asked = False


def test_a_checkpoint_holds_what_the_journal_does_not(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path, steps=2, kl="null") as (saving, parts):
        practise(parts)
        found = saving.checkpoints.newest()
        assert found is not None and found.step == 2
        assert found.facts["position"] == parts.store.position
        assert found.facts["source"] == parts.source.state() and found.facts["learner"].keys() == {
            "kl_value",
            "role_means",
        }


def test_what_the_algorithm_carries_on_survives(world: Path, tmp_path: Path) -> None:
    """An adaptive baseline is state: a run that forgot it would not be the run that went on."""
    given: dict[str, Any] = {"advantage": "reinforce++", "reward.path": "tests.recipes.rewards:in_parts"}
    whole = train(world, tmp_path / "whole", steps=4, **given)
    part = train(world, tmp_path / "part", steps=2, **given)
    assert main(["train", "--resume", str(part), "steps=4"]) == 0
    assert same(weights(part), weights(whole))


def test_steps_beyond_the_checkpoint_are_replayed(world: Path, whole: Path, tmp_path: Path, capsys: Captured) -> None:
    class Killed(BaseException):
        """What ends a run where nothing is caught."""

    def die(step: int) -> None:
        raise Killed

    run = tmp_path / "run"
    try:
        with saver(world, run, steps=4, **{"checkpoint.every": 2}) as (saving, parts):
            save = saving.maybe_save
            saving.maybe_save = lambda step: die(step) if step == 3 else save(step)  # type: ignore[method-assign]
            practise(parts)
    except Killed:
        pass
    assert steps_kept(run) == [2] and [step["step"] for step in measured(run)] == [1, 2]
    assert main(["train", "--resume", str(run)]) == 0
    assert "Going on after step 2" in capsys.readouterr().err
    assert [step["replayed"] for step in measured(run)] == [0, 0, 1, 0]
    assert same(weights(run), weights(whole))
