"""The training-step benchmark at a tiny size: both sides do the same step, and the file says what ran where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.train_step import answers, cases, hybrid_cases, main, mixed_rows, mixture_cases, shared_rows, tree
from etude.models import experts


def test_a_tree_holds_what_rows_share_once() -> None:
    rows = shared_rows(16, 64, prompt=24, answer=4)
    pack = tree(rows)
    assert len(pack.ids) == 2 * (24 + 8 * 4) and rows.tokens == 16 * 28
    ids, action = torch.cat(rows.ids), answers(rows)
    before = torch.cat([torch.tensor([-1]), ids[:-1]])
    assert torch.equal(pack.ids[pack.source[action]].long(), before[action])
    assert torch.equal(tree(mixed_rows(4, 64)).ids.long(), torch.cat(mixed_rows(4, 64).ids))


@pytest.mark.parametrize("name", ["mixed", "shared"])
def test_both_sides_compute_the_same_loss(name: str) -> None:
    (case,) = cases("tiny", 16, [name])
    ours, theirs = case.work(), case.yardstick()
    assert isinstance(ours, float) and ours == pytest.approx(theirs, rel=0.02, abs=0.01)


def test_a_hybrids_tree_computes_what_its_rows_do_apart() -> None:
    alone, apart = hybrid_cases("tiny")
    ours = alone.yardstick()
    assert isinstance(ours, float)
    assert ours == pytest.approx(alone.work(), rel=0.02, abs=0.01) == pytest.approx(apart.work(), rel=0.02, abs=0.01)


def test_a_mixture_computes_the_same_with_any_products(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped, looped, plain = mixture_cases("tiny", 16)
    ours = grouped.yardstick()
    monkeypatch.delattr(experts, "to_expert_order")  # transformers' products do without it
    with pytest.raises(NameError):
        grouped.yardstick()
    assert isinstance(ours, float)
    for case in (grouped, looped, plain):
        assert case.work() == pytest.approx(ours, rel=0.02, abs=0.01)


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["--size", "tiny", "--rows", "16", "--rounds", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert set(report["ratios"]) == {
        *("mixed", "shared", "hybrid", "hybrid, rows apart"),
        *("experts", "experts, grouped", "experts, one by one"),
    }
    assert all(ratio > 0 for ratio in report["ratios"].values())
    assert report["versions"]["torch"] == torch.__version__ and report["size"] == "tiny"
    assert "plain step" in capsys.readouterr().out
