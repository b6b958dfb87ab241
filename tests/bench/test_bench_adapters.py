"""The benchmark of adapters at a tiny size: the compared cases learn and sample the same, and the file says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.adapters import main
from tests.components import require


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require("lora")
    file = tmp_path / "bench.json"
    words = ["--size", "tiny", "--rows", "8", "--rounds", "1", "--only", "sample", "--json", str(file)]
    assert main(words) == 0
    report = json.loads(file.read_text())
    assert set(report["ratios"]) == {"sample: adapter", "sample: merged"} and all(
        r > 0 for r in report["ratios"].values()
    )
    assert report["gaps"].keys() == {"whole", "adapter", "merged"}
    assert all(0 < mean < 0.1 and 0 <= k3 < 0.01 and largest < 0.1 for mean, k3, largest in report["gaps"].values())
    assert "Merging once took" in capsys.readouterr().out


@pytest.mark.soak
def test_training_is_timed_compiled_too(capsys: pytest.CaptureFixture[str]) -> None:
    require("lora")
    assert main(["--size", "tiny", "--rows", "8", "--rounds", "1", "--only", "train"]) == 0
    output = capsys.readouterr().out
    assert "train: adapter" in output and "train: compiled" in output
