"""The benchmark of train engines at a tiny size: all of them make the same step, and the file says what ran where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import train_engines
from bench.common import Case, Measured
from bench.train_engines import NAMES, main


def test_all_engines_compute_the_same_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses: dict[str, list[float]] = {name: [] for name in NAMES}

    def first_steps(cases: list[Case], _rounds: int, _advance: object) -> list[Measured]:
        for case in cases:
            losses[case.name.partition(": ")[2]] += [case.work(), case.yardstick()]  # type: ignore[list-item]
        return [Measured(case.name, case.kind, 1.0, 1.0, 1.0, case.limit, True) for case in cases]

    monkeypatch.setattr(train_engines, "measure", first_steps)
    file = tmp_path / "bench.json"
    assert main(["--size", "tiny", "--json", str(file)]) == 0
    for loss in losses.values():
        assert len(loss) == 6
        assert loss == pytest.approx([loss[0]] * 6, rel=1e-3, abs=1e-4)
    report = json.loads(file.read_text())
    assert {"machine", "versions", "cases", "ratios"} <= report.keys()
    assert set(report["startup"]) == {"plain-1", "plain-2", "fsdp-1", "fsdp-2", "local"}
    assert "fsdp-2 beside plain-2: shared" in capsys.readouterr().out
