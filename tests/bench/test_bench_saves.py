"""The benchmark of saves at a tiny size: each way saves in each round, and the file has every save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.saves import WAYS, main


def test_each_way_saves_in_each_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    words = ["--size", "tiny", "--rounds", "2", "--steps", "1", "--directory", str(tmp_path), "--json", str(file)]
    saves = main(words)
    assert sorted(save.way for save in saves) == sorted(2 * WAYS)
    for save in saves:
        assert save.wait >= 0 and save.steps > 0 and (save.whole > 0) == (save.way != "no save")
    assert len(json.loads(file.read_text())["cases"]) == 6
    assert "in the background" in capsys.readouterr().out and [path.name for path in tmp_path.iterdir()] == [file.name]
