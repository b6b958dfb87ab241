"""The times at which a run saves, the content of a checkpoint, and runs that are resumed from it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from etude.checkpoint import Checkpoint, CheckpointManager
from etude.cli import main
from etude.errors import CheckpointError, EngineError
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.loop import run_loop
from etude.recipes.run.steps.components import RunComponents
from etude.recipes.run.steps.save_resume import CheckpointSaver
from etude.store import PolicyEvaluated
from tests.recipes.runs import Captured, refused, run_of, same, step_metrics, train, weights


@contextmanager
def saver(world: Path, directory: Path, **changes: Any) -> Iterator[tuple[CheckpointSaver, RunComponents]]:
    """Return the saver of a run, with the parts around it."""
    with build(run_of(world, directory=directory, **changes)) as parts:
        yield parts.checkpoint, parts


def steps_kept(directory: Path) -> list[int]:
    """Return the steps of the existing checkpoints."""
    return [checkpoint.step for checkpoint in CheckpointManager(directory / "checkpoints").list_complete()]


def test_a_run_saves_regularly_and_after_the_last_step(world: Path, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", steps=5, **{"checkpoint.every": 2, "checkpoint.keep": 9})
    assert steps_kept(run) == [2, 4, 5]
    assert steps_kept(train(world, tmp_path / "two", steps=5, **{"checkpoint.every": 1})) == [4, 5]


def test_a_new_best_is_saved_and_stays(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path, steps=9, **{"checkpoint.every": 100, "checkpoint.keep": 1}) as (saving, _):
        scores = {1: 0.2, 2: 0.5, 3: 0.5, 4: 0.4}
        saving.score_at = scores.get
        for step in range(1, 7):
            saving.maybe_save(step)
        assert not {3, 4, 5, 6} & set(steps_kept(tmp_path)), "an equal score is no better one"
        saving.save(7)
        best = saving.checkpoints.best()
        assert steps_kept(tmp_path) == [2, 7] and best is not None and best.step == 2


def test_a_stopped_run_saves_the_finished_step(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path, steps=9, **{"checkpoint.every": 100}) as (saving, _):
        steps = saving.remaining_steps()
        assert [next(steps), next(steps)] == [1, 2]
        saving.maybe_save(2)
        assert steps_kept(tmp_path) == []
        saving.interrupt.stop_requested = True
        assert list(steps) == [] and steps_kept(tmp_path) == [2]
        saving.interrupt.stop_requested = False


def test_a_run_without_a_step_saves_nothing(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path) as (saving, _):
        saving.interrupt.stop_requested = True
        assert list(saving.remaining_steps()) == [] and steps_kept(tmp_path) == []
        saving.interrupt.stop_requested = False


def test_a_checkpoint_holds_what_the_journal_does_not(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path, steps=2, kl="null") as (saving, parts):
        run_loop(parts)
        result = saving.checkpoints.newest()
        assert result is not None and result.step == 2
        assert result.facts["position"] == parts.store.position
        assert result.facts["source"] == parts.source.mark()[0] and result.facts["learner"].keys() == {
            "kl_value",
            "role_means",
        }


def test_the_state_of_the_algorithm_is_saved(world: Path, tmp_path: Path) -> None:
    """An adaptive baseline is state: without it the resumed run would differ."""
    options: dict[str, Any] = {"advantage": "reinforce++", "reward.path": "tests.recipes.rewards:in_parts"}
    whole = train(world, tmp_path / "whole", steps=4, **options)
    part = train(world, tmp_path / "part", steps=2, **options)
    assert main(["train", "--resume", str(part), "steps=4"]) == 0
    assert same(weights(part), weights(whole))


class Killed(BaseException):
    """The exception that ends a run, because nothing catches it."""


def die(*_: object) -> NoReturn:
    """End the run here."""
    raise Killed


def test_steps_beyond_the_checkpoint_are_replayed(world: Path, whole: Path, tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "run"
    with (
        suppress(Killed),
        saver(world, run, steps=4, **{"checkpoint.every": 2, "checkpoint.keep": 9}) as (saving, parts),
    ):
        save = saving.maybe_save
        saving.maybe_save = lambda step: die() if step == 3 else save(step)  # type: ignore[method-assign]
        run_loop(parts)
    assert steps_kept(run) == [2]
    assert [step["step"] for step in step_metrics(run)] == [1, 2, 3], "a step's line is written before it is saved"
    before = step_metrics(run)
    assert main(["train", "--resume", str(run)]) == 0
    message = capsys.readouterr().err
    assert "Going on after step 2" in message and "The steps up to 3 were measured before" in message
    assert step_metrics(run)[:3] == before, "what is replayed measures less, and is not written over what was"
    assert [step["step"] for step in step_metrics(run)] == [1, 2, 3, 4]
    assert same(weights(run), weights(whole))


@pytest.mark.slow
def test_a_run_that_lost_its_journal_is_refused_and_gets_no_other(
    world: Path, whole: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / "journal.sqlite").unlink()
    before = sorted(run.iterdir())
    assert "journal.sqlite is missing" in refused(capsys, "train", "--resume", str(run))
    assert sorted(run.iterdir()) == before


def test_a_run_resumes_from_a_checkpoint_saved_during_a_replay(world: Path, whole: Path, tmp_path: Path) -> None:
    """Three steps are admitted and none is saved; then the first is replayed and saved."""
    run = tmp_path / "run"
    for every, last in ((9, 3), (1, 2)):
        with suppress(Killed), saver(world, run, steps=4, **{"checkpoint.every": every}) as (saving, parts):
            save = saving.maybe_save
            saving.maybe_save = lambda step: die() if step == last else save(step)  # type: ignore[method-assign]  # noqa: B023
            run_loop(parts)
    assert steps_kept(run) == [1] and [step["step"] for step in step_metrics(run)] == [1, 2, 3]
    assert main(["train", "--resume", str(run)]) == 0
    assert same(weights(run), weights(whole))


def test_a_step_whose_line_was_lost_is_replayed_and_written(world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with suppress(Killed), saver(world, run, steps=2) as (_, parts):
        parts.measure = die  # type: ignore[method-assign]
        run_loop(parts)
    assert step_metrics(run) == []
    assert main(["train", "--resume", str(run)]) == 0
    assert [(step["step"], step["replayed"]) for step in step_metrics(run)] == [(1, 1), (2, 0)]


def test_pending_metrics_are_written_before_a_save(world: Path, tmp_path: Path) -> None:
    seen: list[list[int]] = []
    options: dict[str, Any] = {"observe.every": 10, "checkpoint.every": 3}
    with saver(world, tmp_path, steps=4, **options) as (saving, parts):
        save = saving.checkpoints.save

        def watched(*arguments: Any) -> Checkpoint:
            seen.append([line["step"] for line in step_metrics(tmp_path)])
            return save(*arguments)

        saving.checkpoints.save = watched  # type: ignore[method-assign]
        run_loop(parts)
    assert seen == [[3], [3, 4]]


# -- saves in the background -------------------------------------------------------------------------------------------

IN_BACKGROUND: dict[str, Any] = {"checkpoint.async_save": "true", "checkpoint.every": 1}


class Disk:
    """A disk that is slow, or fails, when a checkpoint is written."""

    def __init__(self, parts: RunComponents, *, fails_at: int = 0) -> None:
        self.free, self._count, self._fails_at = threading.Event(), 0, fails_at
        kept = parts.checkpoint.checkpoints
        parts.checkpoint.checkpoints = CheckpointManager(kept.directory, kept.keep, on_point=self._reached)

    def _reached(self, point: str) -> None:
        if point == "checkpoint.renaming":
            self._count += 1
            assert self.free.wait(60)
            if self._count == self._fails_at:
                raise OSError("the disk is full")


def test_a_run_that_saves_in_the_background_is_the_run_bit_for_bit(world: Path, whole: Path, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", steps=2, **IN_BACKGROUND, checkpoint__keep=4)
    assert steps_kept(run) == [1, 2] and "save_seconds" in step_metrics(run)[1]
    assert main(["train", "--resume", str(run), "steps=4"]) == 0
    assert steps_kept(run) == [1, 2, 3, 4]
    for step in (1, 4):
        assert same(weights(run, step), weights(whole, step))


def test_a_step_counts_as_saved_when_its_checkpoint_is_whole(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path, steps=9, **IN_BACKGROUND) as (saving, parts):
        disk = Disk(parts)
        saving.score_at = {1: 0.2, 2: 0.5, 3: 0.4}.get
        saving.maybe_save(1)
        assert (saving.saved_step, saving.pending_step, steps_kept(tmp_path)) == (0, 1, [])
        disk.free.set()
        saving.maybe_save(2)  # waits for the save before
        assert saving.saved_step == 1 and saving.pending_step == 2
        best = saving.checkpoints.best()
        assert best is not None and best.step == 1, "the second is not known to be whole"
        saving.finish()
        best = saving.checkpoints.best()
        assert saving.saved_step == 2 and best is not None and best.step == 2


def test_a_score_is_compared_with_that_of_a_save_under_way(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path, steps=9, **IN_BACKGROUND | {"checkpoint.every": 100}) as (saving, _):
        saving.score_at = {1: 0.5, 2: 0.4, 3: 0.6}.get
        for step in (1, 2, 3):
            saving.maybe_save(step)
            assert saving.pending_step == (1 if step < 3 else 3)


def test_a_save_that_failed_ends_the_run_at_the_next_one(world: Path, tmp_path: Path) -> None:
    with saver(world, tmp_path, steps=4, **IN_BACKGROUND) as (_, parts):
        Disk(parts, fails_at=2).free.set()
        with pytest.raises(CheckpointError, match=r"Step 2 could not be saved .*the disk is full"):
            run_loop(parts)
    assert steps_kept(tmp_path) == [1] and [step["step"] for step in step_metrics(tmp_path)] == [1, 2, 3]


def test_the_last_save_that_failed_ends_the_run(world: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"Step 1 could not be saved"),
        saver(world, tmp_path, steps=1, **IN_BACKGROUND) as (_, parts),
    ):
        Disk(parts, fails_at=1).free.set()
        run_loop(parts)
    assert steps_kept(tmp_path) == []


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_run_that_fails_waits_for_its_save(fails_at: int, world: Path, tmp_path: Path, capsys: Captured) -> None:
    with suppress(Killed), saver(world, tmp_path, steps=4, **IN_BACKGROUND) as (saving, parts):
        disk = Disk(parts, fails_at=fails_at)
        saving.save(1)
        threading.Timer(0.2, disk.free.set).start()
        raise Killed
    assert steps_kept(tmp_path) == ([] if fails_at else [1])
    assert ("Step 1 could not be saved" in capsys.readouterr().err) == bool(fails_at)


def test_a_run_that_is_stopped_at_once_does_not_wait(world: Path, tmp_path: Path, capsys: Captured) -> None:
    with pytest.raises(KeyboardInterrupt), saver(world, tmp_path, steps=4, **IN_BACKGROUND) as (saving, parts):
        disk = Disk(parts)
        saving.save(1)
        raise KeyboardInterrupt
    assert "No step was saved yet" in capsys.readouterr().err and steps_kept(tmp_path) == []
    disk.free.set()


def scored(
    world: Path, directory: Path, **changes: Any
) -> AbstractContextManager[tuple[CheckpointSaver, RunComponents]]:
    """A run that is scored at each second step."""
    options = {"data.val": f"[{world / 'held_out.jsonl'}]", "evaluate.every": 2, "checkpoint.every": 1} | changes
    return saver(world, directory, steps=4, **options)


def test_a_kill_between_a_save_and_marking_the_best_loses_nothing(world: Path, tmp_path: Path) -> None:
    with suppress(Killed), scored(world, tmp_path) as (saving, parts):
        saving.checkpoints.mark_best = die  # type: ignore[method-assign]
        run_loop(parts)
    assert steps_kept(tmp_path)[-1] == 2 and not (tmp_path / "checkpoints" / "best.json").exists()
    with scored(world, tmp_path) as (saving, parts):
        best = saving.checkpoints.best()
        assert best is not None and best.step == 2
        assert saving.checkpoints.best_score(saving.evaluation_id) == best.facts["score"]


def test_a_step_with_a_score_in_the_journal_is_not_scored_again(world: Path, tmp_path: Path) -> None:
    def scores(parts: RunComponents) -> list[tuple[int, Any]]:
        result = [
            event for _, event in parts.store.read(kinds=(PolicyEvaluated,)) if isinstance(event, PolicyEvaluated)
        ]
        return [(event.step, event.scores) for event in result]

    with suppress(Killed), scored(world, tmp_path, **{"checkpoint.every": 4}) as (saving, parts):
        saving.maybe_save = lambda step: die() if step == 3 else None  # type: ignore[method-assign]
        run_loop(parts)
    with scored(world, tmp_path, **{"checkpoint.every": 4}) as (saving, parts):
        assert [step for step, _ in scores(parts)] == [0, 2]
        run_loop(parts)
        assert [step for step, _ in scores(parts)] == [0, 2, 4]
        assert saving.score_at(2) == scores(parts)[1][1]["eval/mean@1"]


def test_scores_of_other_evaluations_are_not_compared(world: Path, tmp_path: Path) -> None:
    with scored(world, tmp_path) as (saving, _):
        saving.save(1)
        saving.checkpoints.mark_best(1, 100.0, saving.evaluation_id)
    with scored(world, tmp_path, **{"evaluate.limit": 2}) as (saving, parts):
        assert saving.checkpoints.best_score(saving.evaluation_id) is None
        run_loop(parts)
        best = saving.checkpoints.best()
        assert best is not None and best.step > 1


def test_a_step_whose_evaluation_fails_is_saved_too(world: Path, tmp_path: Path) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        raise EngineError("out of memory")

    with scored(world, tmp_path, **{"evaluate.first": "false"}) as (_, parts):
        assert parts.evaluate.evaluator is not None
        parts.evaluate.evaluator.answer_all = fails  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="out of memory"):
            run_loop(parts)
    assert steps_kept(tmp_path)[-1] == 2 and [step["step"] for step in step_metrics(tmp_path)] == [1, 2]
    with scored(world, tmp_path) as (saving, parts):
        parts.begin()
        best = saving.checkpoints.best()
        assert best is not None and best.step == 2, "it is scored when the run goes on"


def test_a_score_in_which_answers_failed_is_reported_and_marks_no_best(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    options = {"reward.path": "tests.recipes.rewards:choosy", "evaluate.first": "false", "collect.timeout": 60}
    with scored(world, tmp_path, **options) as (saving, parts):
        run_loop(parts)
        assert saving.checkpoints.best() is None
    message = capsys.readouterr().err
    assert "5 of 5 answers that were to be scored after step 2 failed" in message and "marks no best" in message
