"""The benchmark of asynchronous training, for a few steps: each bound has its time and its prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.asynchronous import main


@pytest.mark.slow
def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    runs = main(["--rounds", "1", "--steps", "2", "--staleness", "0", "1", "--wait", "0.5", "--json", str(file)])
    assert [run.staleness for run in runs] == [0, 1] and all(run.seconds > 0 < run.predicted for run in runs)
    report = json.loads(file.read_text())
    assert report["ratios"].keys() == {"max_staleness=0: faster", "max_staleness=1: faster"}, "the target is far"
    assert report["ratios"]["max_staleness=0: faster"] == 1 and "to target" in capsys.readouterr().out
