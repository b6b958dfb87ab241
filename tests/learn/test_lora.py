"""An adapter learns: it beats a control with a learning rate of zero, sampled by its products or merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.components import require
from tests.learn.test_presets import accuracy, beats


@pytest.mark.parametrize("publish", ["adapter", pytest.param("merged", marks=pytest.mark.soak)])
def test_an_adapter_beats_its_control_by_four_standard_errors(publish: str, warmed: Path, tmp_path: Path) -> None:
    require("lora")
    options = {"lora.rank": 8, "lora.publish": publish}
    trained = accuracy(tmp_path / "trained", warmed, "grpo", 3e-3, **options)
    control = accuracy(tmp_path / "control", warmed, "grpo", 0.0, steps=1, **options)
    beats(trained, control, f"lora, {publish}")
