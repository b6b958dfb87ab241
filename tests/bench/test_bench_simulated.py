"""The benchmark of predictions, for a few steps: each bound has its time and its prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulated import main


@pytest.mark.slow
def test_the_command_writes_what_it_measured_and_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    words = ["--steps", "2", "--staleness", "1", "--case", "few", "--wait", "0.02", "--json", str(file)]
    runs = main(words)
    assert [(run.case, run.staleness) for run in runs] == [("few", 0), ("few", 1)]
    assert all(run.measured > 0 < run.predicted for run in runs) and "predicted" in capsys.readouterr().out
    assert json.loads(file.read_text())["ratios"].keys() == {
        "few, max_staleness=0: predicted",
        "few, max_staleness=1: predicted",
    }
