"""What is compared, and what is left on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.algorithms import LOSSES
from etude.config.compose import compose
from etude.demo.algorithms import DemoRun
from etude.demo.compare import entries, new_directory, report, train_entry
from etude.errors import ConfigError, EtudeError

SHORT = ["steps=2", "groups=2", "group_size=4", "updates=2"]


def test_every_loss_is_an_entry_with_its_own_run() -> None:
    found = entries(SHORT, None, sweep=False)
    assert [entry.name for entry in found] == list(LOSSES)
    assert all(entry.run is not None and type(entry.run.loss) is LOSSES[entry.name] for entry in found)


def test_what_every_loss_refuses_is_told_once() -> None:
    with pytest.raises(ConfigError, match="steps must be at least 1") as told:
        entries(["steps=0"], None, sweep=False)
    assert str(told.value).count("steps must be") == 1


def test_a_file_is_asked_whether_it_chooses_the_loss(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("steps: 2\n")
    (tmp_path / "chosen.yaml").write_text("steps: 2\nloss: {name: cispo}\n")
    assert len(entries(["updates=2"], tmp_path / "short.yaml", sweep=False)) == len(LOSSES)
    assert [entry.name for entry in entries([], tmp_path / "chosen.yaml", sweep=False)] == ["cispo"]


def test_a_sweep_is_named_by_what_differs() -> None:
    found = entries(["steps=2", "seed=1,2"], None, sweep=True)
    assert [entry.name for entry in found] == ["seed=1", "seed=2"]
    assert [entry.run.seed for entry in found if entry.run] == [1, 2]


def test_a_trained_entry_leaves_its_metrics_and_its_options(tmp_path: Path) -> None:
    (entry,) = entries([*SHORT, "loss=ppo", "kl=reverse"], None, sweep=False)
    steps: list[int] = []
    train_entry(entry, tmp_path / "ppo", lambda: steps.append(len(entry.curve)))
    assert steps == [1, 2, 3]
    assert compose(DemoRun, file=tmp_path / "ppo" / "run.yaml") == entry.run
    logged = [json.loads(line) for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["expected_reward"] for row in logged] == entry.curve[1:]
    told = report([entry], tmp_path, tmp_path / "curves.png")
    assert told["runs"][0]["after"] == entry.curve[-1] and told["runs"][0]["optimum"] == 1.0


def test_what_is_refused_while_training_is_kept_with_the_entry(tmp_path: Path) -> None:
    """GMPO takes one advantage a rollout, which only shows once GAE has given several."""
    (entry,) = entries([*SHORT, "loss=gmpo", "advantage=gae"], None, sweep=False)
    train_entry(entry, tmp_path, lambda: None)
    assert "GMPO takes one" in entry.refused and not entry.learnt
    assert report([entry], tmp_path, tmp_path)["runs"] == [{"name": "gmpo", "refused": entry.refused}]


def test_a_new_directory_is_new(tmp_path: Path) -> None:
    assert new_directory(tmp_path / "a") != new_directory(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(EtudeError, match="no folder can be made there"):
        new_directory(tmp_path / "file")


@pytest.mark.parametrize("seed", [0, 1])
def test_every_loss_learns(seed: int, tmp_path: Path) -> None:
    """With the options that the demonstration has by itself: nine tenths of the way, each of them."""
    for entry in entries([f"seed={seed}"], None, sweep=False):
        train_entry(entry, tmp_path / entry.folder, lambda: None)
        assert entry.learnt, (entry.name, entry.share)
