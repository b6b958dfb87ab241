"""The benchmark runs at a tiny size: everything is timed, and the file says what ran where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.algorithms import cases, copies, main, random_batch
from bench.common import Case, measure
from etude.algorithms import ADVANTAGES, LOSSES, View
from etude.algorithms.losses import SUPERVISED

BATCH = random_batch(16, 256)


def test_the_batch_has_turns_and_groups_of_eight() -> None:
    assert BATCH.num_rollouts == 16 and torch.bincount(BATCH.group).tolist() == [8, 8]
    view = View(BATCH)
    assert 0 < len(view.action_index) < BATCH.num_tokens and view.turns.count > BATCH.num_rollouts


def test_every_estimator_and_every_loss_is_timed_once() -> None:
    names = [case.name for case in cases(BATCH, [])]
    assert names == [f"advantage={n}" for n in ADVANTAGES] + [f"loss={n}" for n in (*LOSSES, *SUPERVISED)]


def test_a_copy_is_a_copy() -> None:
    x = torch.randn(5)
    (y,) = copies([x])
    assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()


def test_a_ratio_is_the_work_over_its_yardstick() -> None:
    def spin(n: int) -> None:
        torch.randn(n, 200, 200).matmul(torch.randn(200, 200))

    (slow,) = measure([Case("slow", "kind", lambda: spin(40), lambda: spin(2), limit=5)], rounds=3)
    (same,) = measure([Case("same", "kind", lambda: spin(5), lambda: spin(5), limit=5)], rounds=3)
    assert slow.ratio > 5 and not slow.met
    assert same.met


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["--sequences", "16", "--longest", "128", "--rounds", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["machine"]["threads"] == torch.get_num_threads() and report["versions"]["torch"] == torch.__version__
    assert report["sequences"] == 16 and len(report["ratios"]) == len(report["cases"]) == len(cases(BATCH, []))
    assert all(ratio > 0 for ratio in report["ratios"].values())
    assert "loss=ppo" in capsys.readouterr().out


def test_a_name_that_is_neither_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--sequences", "16", "--only", "no_such_loss"])
    assert "none of these is an estimator or a loss: no_such_loss" in capsys.readouterr().err
