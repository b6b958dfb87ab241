"""A run that failed before its first step begins anew in its directory; others keep what they have."""

from __future__ import annotations

from pathlib import Path

from etude.cli import main
from etude.recipes.run.directory import read_metrics, read_run
from etude.recipes.run.resume.first_step import continue_or_begin_anew, failed_before_first_step
from etude.recipes.run.resume.session_log import read_sessions, record_session
from tests.recipes.runs import Captured, options, refused_run, train

FAILING = {"reward.path": "tests.recipes.rewards:text", "steps": 1}


def failed_run(world: Path, directory: Path) -> Path:
    """Return the directory of a run whose first step could not be collected."""
    assert main(["train", *options(world, directory=directory, **FAILING)]) == 2
    assert (directory / "run.yaml").exists() and read_sessions(directory)[-1].how == "failed"
    return directory


def test_a_run_that_failed_before_its_first_step_begins_anew_with_other_options(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = failed_run(world, tmp_path / "run")
    train(world, run, seed=7, steps=1)
    assert "failed before its first step. What it wrote is removed" in capsys.readouterr().err
    assert read_run(run).seed == 7 and len(read_metrics(run)) == 1
    assert [session.how for session in read_sessions(run)] == ["done"]


def test_a_run_that_was_stopped_once_stays_after_it_has_failed_too(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = failed_run(world, tmp_path / "run")
    with record_session(run, lambda: 0, lambda: False):
        pass
    assert main(["train", "--resume", str(run)]) == 2
    assert [session.how for session in read_sessions(run)] == ["failed", "stopped", "failed"]
    assert "seed was 0, is 7" in refused_run(capsys, world, run, seed=7, steps=1)


def test_files_of_another_program_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    assert not failed_before_first_step(tmp_path)


def test_a_folder_that_is_a_link_stays(world: Path, tmp_path: Path) -> None:
    run = failed_run(world, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (run / "evaluations").symlink_to(tmp_path / "elsewhere")
    (run / "replay.json").write_text("{}")
    continue_or_begin_anew(run, read_run(run), "")
    assert (run / "evaluations").is_symlink() and not (run / "run.yaml").exists()
    assert not (run / "replay.json").exists()


def test_a_run_that_failed_before_its_first_step_begins_anew_with_other_files(world: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text((world / "tasks.jsonl").read_text())
    run = tmp_path / "run"
    assert main(["train", *options(world, directory=run, data__train=f"[{tasks}]", **FAILING)]) == 2
    tasks.write_text("".join(tasks.read_text().splitlines(keepends=True)[1:]))
    train(world, run, data__train=f"[{tasks}]", steps=1)
    assert len(read_metrics(run)) == 1


def test_a_run_that_was_stopped_is_not_removed_and_is_not_said_to_have_a_model(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = failed_run(world, tmp_path / "run")
    with record_session(run, lambda: 0, lambda: False):
        pass
    message = refused_run(capsys, world, run, seed=7, steps=1)
    assert "seed was 0, is 7" in message and "this one has saved no step" in message and "export" not in message
    message = refused_run(capsys, world, tmp_path / "other", **{"model.path": run})
    assert "It has saved no step yet, so it has no model to give." in message and "export" not in message


def test_a_run_with_a_step_is_not_removed(whole: Path, world: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, whole, seed=7)
    assert "begin a new run from it: `etude export" in message and (whole / "checkpoints").exists()
