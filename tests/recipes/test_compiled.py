"""A run whose elementwise operations are compiled learns the same, up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.models import create, save, tiny_config
from tests.recipes.runs import Captured, refused_run, step_metrics, train, weights
from tests.worlds import make_tokenizer


@pytest.mark.soak
def test_a_compiled_run_learns_the_same_and_resumes(world: Path, whole: Path, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", steps=2, **{"train.compile": "true"})
    train(world, run, steps=4, **{"train.compile": "false"})
    wanted, result = weights(whole), weights(run)
    for name in wanted:
        torch.testing.assert_close(result[name], wanted[name], rtol=0.05, atol=0.02)
    for line, plain in zip(step_metrics(run), step_metrics(whole), strict=True):
        assert line["mismatch/k3"] < 1e-9 and line["reward"] == plain["reward"]


def test_a_family_with_its_own_forward_pass_is_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    size = make_tokenizer(tmp_path / "model")
    save(create(tiny_config(size, family="gpt2", layers=1, hidden=16, heads=2), seed=0), tmp_path / "model")
    options = {"train.compile": "true", "model.path": tmp_path / "model"}
    assert "This is a gpt2 model" in refused_run(capsys, world, tmp_path / "run", **options)
