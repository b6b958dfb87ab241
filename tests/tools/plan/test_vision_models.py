"""A model with a vision tower has a plan, in which a frozen tower needs weights and nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.tools.plan.dry_run import dry_run
from tests.recipes.runs import run_of
from tests.vlms import make_vlm


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_a_frozen_tower_needs_no_optimizer(device: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "How many?", "answer": "two"}\n')
    peaks = []
    for train in (False, True):
        run = run_of(tmp_path, **{"model.path": make_vlm("qwen3_vl"), "vision.train": train, "device": "cpu"})
        peaks.append(dry_run(run, torch.device(device)).memory.peak().kinds)
    frozen, trained = peaks
    assert frozen["weights"] == trained["weights"]
    assert 1.5 < trained["optimizer"] / frozen["optimizer"] < 4
