"""Several runs from one command line: each in a different directory, and each can be resumed."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from etude.algorithms import Denominators, LossValue, View
from etude.algorithms.losses.clip import PPO
from etude.cli import main
from etude.observe import make_console
from etude.recipes.run.resume.session_log import read_sessions
from etude.recipes.sweep_summary import print_summary
from tests.recipes.rewards import planned
from tests.recipes.runs import Captured, options, refused, same, step_metrics, train, weights


def test_each_run_has_a_directory_named_by_its_differences_and_a_line_in_a_table(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    sweep = tmp_path / "sweep"
    words = options(world, directory=sweep, steps=1, loss="ppo,gspo", **{"observe.console": "plain"})
    assert main(["train", "grpo", "--multirun", *words]) == 0
    header, *lines = capsys.readouterr().out.strip().splitlines()[-3:]
    assert header.split()[:4] == ["run", "end", "step", "reward"]
    assert [line.split()[:3] for line in lines] == [["0-loss-ppo", "done", "1"], ["1-loss-gspo", "done", "1"]]
    assert {path.name for path in sweep.iterdir()} == {"0-loss-ppo", "1-loss-gspo"}
    alone = train(world, tmp_path / "alone", "grpo", steps=1, loss="gspo")
    assert same(weights(sweep / "1-loss-gspo"), weights(alone))
    assert main(["train", "--resume", str(sweep / "1-loss-gspo"), "steps=2"]) == 0
    assert len(step_metrics(sweep / "1-loss-gspo")) == 2
    presets = [session.preset for run in (sweep / "1-loss-gspo", alone) for session in read_sessions(run)]
    assert presets == ["grpo", "", "grpo"], "a command that resumes a run names none"


def test_without_a_directory_a_new_one_is_created_below_runs(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--multirun", *options(world, steps=1, seed="range(0,2)")]) == 0
    (sweep,) = (tmp_path / "runs").iterdir()
    assert sweep.name.startswith("sweep-") and {path.name for path in sweep.iterdir()} == {"0-seed-0", "1-seed-1"}


def test_a_failing_run_does_not_stop_the_others_and_can_be_resumed(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = options(world, directory=tmp_path, steps=1, **{"reward.path": None})
    judges = "reward.path='tests.recipes.rewards:nan','tests.recipes.rewards:digits'"
    message = refused(capsys, "train", "--multirun", *words, judges)
    assert f"1 of 2 runs in {tmp_path} failed" in message and "returned nan" in message
    failed, done = sorted(tmp_path.iterdir())
    assert len(step_metrics(done)) == 1 and not (failed / "checkpoints").exists()
    refused(capsys, "train", "--multirun", *words, judges)
    assert len(step_metrics(done)) == 1


def test_every_run_is_composed_before_the_first_begins(world: Path, tmp_path: Path, capsys: Captured) -> None:
    assert "group_size" in refused(
        capsys, "train", "--multirun", *options(world, directory=tmp_path / "s", **{"collect.group_size": "4,0"})
    )
    assert not (tmp_path / "s").exists()


def test_a_signal_in_the_last_step_of_a_run_ends_the_sweep_too(world: Path, tmp_path: Path) -> None:
    with planned({20: signal.SIGINT}):
        assert main(["train", "--multirun", *options(world, directory=tmp_path, seed="0,1")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["0-seed-0"] and len(step_metrics(tmp_path / "0-seed-0")) == 2


def test_the_differences_of_a_run_may_be_long(world: Path, tmp_path: Path) -> None:
    shutil.copy(world / "tasks.jsonl", tmp_path / f"{'long' * 50}.jsonl")
    files = f"data.train=[{world / 'tasks.jsonl'}],[{tmp_path / ('long' * 50)}.jsonl]"
    words = options(world, directory=tmp_path / "sweep", steps=1, **{"data.train": None})
    assert main(["train", "--multirun", *words, files]) == 0
    assert all(len(path.name.encode()) < 200 for path in (tmp_path / "sweep").iterdir())


def test_the_error_that_ends_one_run_is_reported_and_the_others_go_on(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = options(world, directory=tmp_path, steps=1, loss="tests.recipes.test_sweep:Mistaken,ppo")
    assert main(["train", "--multirun", *words]) == 2
    message = capsys.readouterr().err.partition("etude: ")[2]
    assert "1 of 2 runs" in message and "ZeroDivisionError: a mistake" in message
    assert len(step_metrics(tmp_path / "1-loss-ppo")) == 1


def test_a_sweep_has_one_directory(world: Path, tmp_path: Path, capsys: Captured) -> None:
    swept = f"directory={tmp_path / 'a'},{tmp_path / 'b'}"
    assert "A sweep has one directory" in refused(capsys, "train", "--multirun", *options(world), swept)
    assert not any(tmp_path.iterdir())


def test_the_number_of_threads_is_restored(world: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    train(world, tmp_path / "run", steps=1, threads=before + 1)
    assert torch.get_num_threads() == before


def test_the_table_of_a_sweep_has_the_last_value_of_each_metric(tmp_path: Path, capsys: Captured) -> None:
    for name, reward in (("0-a", 0.25), ("1-b", 0.5)):
        lines = [{"step": step, "reward": reward * step, "time/step": 30.0, "time": 0.0} for step in (1, 2)]
        lines[0] |= {"eval/mean@4": 0.125, "eval/best@4": 1.0}
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    print_summary(make_console("plain"), tmp_path, ["0-a", "1-b", "2-c"], {"1-b"})
    header, *rows = capsys.readouterr().out.strip().splitlines()
    assert header.split() == ["run", "end", "step", "reward", "eval/mean@4", "time"]
    assert rows[0].split() == ["0-a", "done", "2", "0.5000", "0.1250", "1", "min", "00", "s"]
    assert rows[1].split()[:4] == ["1-b", "failed", "2", "1.000"]
    assert rows[2].split()[:6] == ["2-c", "not", "begun", "–", "–", "–"]


class Mistaken(PPO):
    """A loss with a bug."""

    def __call__(self, view: View, whole: Denominators) -> LossValue:
        raise ZeroDivisionError("a mistake")
