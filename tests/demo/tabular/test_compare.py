"""The entries of a comparison, and the files that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.algorithms import LOSSES
from etude.config.compose import compose
from etude.demo.tabular.compare import build_report, new_directory, select_runs, train_run
from etude.demo.tabular.run import DemoRun
from etude.errors import ConfigError, EtudeError
from etude.observe import JsonlSink, RunInfo

SHORT = ["steps=2", "groups=2", "group_size=4", "mini_batches=2"]


def test_every_loss_is_an_entry_with_its_own_run() -> None:
    selected = select_runs(SHORT, None, sweep=False)
    assert [entry.name for entry in selected] == list(LOSSES)
    assert all(entry.run is not None and type(entry.run.loss) is LOSSES[entry.name] for entry in selected)


def test_an_error_of_every_loss_is_reported_once() -> None:
    with pytest.raises(ConfigError, match="steps must be at least 1") as raised:
        select_runs(["steps=0"], None, sweep=False)
    assert str(raised.value).count("steps must be") == 1


def test_a_file_may_choose_the_loss(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("steps: 2\n")
    (tmp_path / "chosen.yaml").write_text("steps: 2\nloss: {name: cispo}\n")
    assert len(select_runs(["mini_batches=2"], tmp_path / "short.yaml", sweep=False)) == len(LOSSES)
    assert [entry.name for entry in select_runs([], tmp_path / "chosen.yaml", sweep=False)] == ["cispo"]


def test_a_sweep_is_named_by_what_differs() -> None:
    selected = select_runs(["steps=2", "seed=1,2"], None, sweep=True)
    assert [entry.name for entry in selected] == ["seed=1", "seed=2"]
    assert [entry.run.seed for entry in selected if entry.run] == [1, 2]


def test_the_jobs_of_a_sweep_never_share_a_folder(tmp_path: Path) -> None:
    """Neither if a job is asked for twice, nor if names differ only in characters that a folder's name cannot have."""
    long = "observe.wandb.name=" + "x" * 300
    for sweep in (["seed=0,0"], ["observe.wandb.name='a:b','a|b'"], [f"{long}a,{'y' * 300}b"]):
        selected = select_runs([*SHORT, "loss=ppo", *sweep], None, sweep=True)
        assert len({entry.folder for entry in selected}) == len(selected) == 2
        assert all(entry.name and len(entry.folder) <= 100 for entry in selected)
        for entry in selected:
            train_run(entry, tmp_path / sweep[0][:25] / entry.folder, lambda: None)
        for entry in selected:
            rows = (tmp_path / sweep[0][:25] / entry.folder / "metrics.jsonl").read_text().splitlines()
            assert len(rows) == 2
            assert build_report([entry], tmp_path, tmp_path)["runs"][0]["folder"] == entry.folder


@pytest.mark.parametrize("option", ["directory=A,B", "observe.console=plain,off", "observe.level=info,error"])
def test_a_sweep_over_shared_options_is_refused(option: str) -> None:
    key, _, values = option.partition("=")
    with pytest.raises(ConfigError, match=f"several values of `{key}`: {values.replace(',', ', ')}. Give it one"):
        select_runs([*SHORT, option], None, sweep=True)


def test_the_options_are_saved_even_if_no_metrics_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: JsonlSink, run: RunInfo) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(JsonlSink, "open", failing)
    (entry,) = select_runs([*SHORT, "loss=ppo"], None, sweep=False)
    train_run(entry, tmp_path / "new" / "ppo", lambda: None)
    assert not entry.refused and compose(DemoRun, file=tmp_path / "new" / "ppo" / "run.yaml") == entry.run


def test_a_trained_entry_leaves_its_metrics_and_its_options(tmp_path: Path) -> None:
    (entry,) = select_runs([*SHORT, "loss=ppo", "kl=reverse"], None, sweep=False)
    steps: list[int] = []
    train_run(entry, tmp_path / "ppo", lambda: steps.append(len(entry.curve)))
    assert steps == [1, 2, 3]
    assert compose(DemoRun, file=tmp_path / "ppo" / "run.yaml") == entry.run
    logged = [json.loads(line) for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["expected_reward"] for row in logged] == entry.curve[1:]
    report = build_report([entry], tmp_path, tmp_path / "curves.png")
    assert report["runs"][0]["after"] == entry.curve[-1] and report["runs"][0]["optimum"] == 1.0


def test_an_error_during_training_is_kept_with_the_entry(tmp_path: Path) -> None:
    """GMPO takes one advantage a rollout, so the error comes once GAE has given several."""
    (entry,) = select_runs([*SHORT, "loss=gmpo", "advantage=gae"], None, sweep=False)
    train_run(entry, tmp_path, lambda: None)
    assert "GMPO takes one" in entry.refused and not entry.learnt
    assert build_report([entry], tmp_path, tmp_path)["runs"] == [{"name": "gmpo", "refused": entry.refused}]


def test_a_new_directory_is_new(tmp_path: Path) -> None:
    assert new_directory(tmp_path / "a") != new_directory(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(EtudeError, match="no directory can be created there"):
        new_directory(tmp_path / "file")


@pytest.mark.integration
@pytest.mark.parametrize("seed", [0, 1])
def test_every_loss_learns(seed: int, tmp_path: Path) -> None:
    """With the demonstration's default options, each loss reaches nine tenths of the optimum."""
    for entry in select_runs([f"seed={seed}"], None, sweep=False):
        train_run(entry, tmp_path / entry.folder, lambda: None)
        assert entry.learnt, (entry.name, entry.share)
