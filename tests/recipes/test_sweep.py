"""Several runs from one command line: each in a directory of its own, and to be gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.cli import main
from tests.recipes.runs import Captured, measured, options, refused, same, train, weights


def test_each_run_has_a_directory_that_tells_it_apart(world: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = options(world, directory=sweep, steps=1, loss="ppo,gspo")
    assert main(["train", "grpo", "--multirun", *words]) == 0
    assert {path.name for path in sweep.iterdir()} == {"0-loss-ppo", "1-loss-gspo"}
    alone = train(world, tmp_path / "alone", "grpo", steps=1, loss="gspo")
    assert same(weights(sweep / "1-loss-gspo"), weights(alone))
    assert main(["train", "--resume", str(sweep / "1-loss-gspo"), "steps=2"]) == 0
    assert len(measured(sweep / "1-loss-gspo")) == 2


def test_without_a_directory_a_new_one_is_made_below_runs(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--multirun", *options(world, steps=1, seed="range(0,2)")]) == 0
    (sweep,) = (tmp_path / "runs").iterdir()
    assert sweep.name.startswith("sweep-") and {path.name for path in sweep.iterdir()} == {"0-seed-0", "1-seed-1"}


def test_one_that_fails_does_not_stop_the_others_and_goes_on_when_asked_again(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = options(world, directory=tmp_path, steps=1, **{"reward.path": None})
    judges = "reward.path='tests.recipes.rewards:nan','tests.recipes.rewards:digits'"
    told = refused(capsys, "train", "--multirun", *words, judges)
    assert f"1 of 2 runs in {tmp_path} failed" in told and "returned nan" in told
    failed, done = sorted(tmp_path.iterdir())
    assert len(measured(done)) == 1 and not (failed / "checkpoints").exists()
    refused(capsys, "train", "--multirun", *words, judges)
    assert len(measured(done)) == 1


def test_every_run_is_composed_before_the_first_begins(world: Path, tmp_path: Path, capsys: Captured) -> None:
    assert "group_size" in refused(
        capsys, "train", "--multirun", *options(world, directory=tmp_path / "s", **{"collect.group_size": "4,0"})
    )
    assert not (tmp_path / "s").exists()
