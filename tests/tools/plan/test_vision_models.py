"""A model with a vision tower has a plan, in which a frozen tower needs weights and nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.config.compose import compose
from etude.recipes.supervised.runs import SFTRun
from etude.tools.plan.dry_run import dry_run
from etude.tools.plan.supervised_dry_run import worst_case_examples
from etude.tools.plan.worst_images import find_worst_images
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


def test_a_supervised_plan_has_the_row_of_text_and_the_row_of_images() -> None:
    """A frozen tower needs least where a row is text, whose logits need most; a trained tower needs most elsewhere."""
    peaks = []
    for train in ("false", "true"):
        options = ("data.max_tokens=200", "batch_size=1", "steps=1", "device=cpu", f"vision.train={train}")
        run = compose(SFTRun, [f"model.path={make_vlm('qwen3_vl')}", *options, "train.precision=fp32"])
        dry = dry_run(run, torch.device("cpu"))
        peaks.append(dry.memory.peak("updating").kinds)
    frozen, trained = peaks
    assert frozen["logits"] >= 199 * dry.model.vocab_size * 4
    assert trained.get("logits", 0) < 20 * dry.model.vocab_size * 4 and trained["activations"] > frozen["activations"]
    images = find_worst_images(run, 199)
    batch = worst_case_examples(run, 200, 1, images)
    assert images is not None and batch.image is not None
    shown = int((batch.image >= 0).sum())
    assert shown == images.tokens * images.count > 190 and int(batch.action.sum()) == 200 - shown
