"""The benchmark of carriers at a tiny size: what it times arrives, and the file says what each cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.sync import main


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["--size", "tiny", "--rounds", "1", "--bucket-mib", "1", "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert set(told["ratios"]) == {"alias", "local", "shm", "disk", "gloo"}
    assert told["bytes"] > 0 and told["bucket_mib"] == 1
    assert "of a copy's bandwidth" in capsys.readouterr().out
