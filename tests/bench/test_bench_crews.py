"""The benchmark of crews, for a few steps: each kind of crew has its calls and other measurements, also in the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.crews import AIMS, ANSWERS, CALLS, LAID, Timed, main


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["--steps", "3", "--only", "local", "processes", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert {"machine", "versions", "cases", "ratios"} <= report.keys()
    expected = [(crew, what) for crew in ("local", "processes") for what in (CALLS, LAID, ANSWERS)]
    assert [(case["name"], case["what"]) for case in report["cases"]] == expected
    assert set(report["ratios"]) == {f"{crew}: {what}" for crew, what in expected}
    assert all(case["milliseconds"] > 0 for case in report["cases"])
    output = capsys.readouterr().out
    assert output.count(CALLS) == output.count(LAID) == output.count(ANSWERS) == 2


def test_calls_are_held_to_the_aim_and_the_rest_stands_beside_them() -> None:
    assert Timed("ray", 2, CALLS, AIMS["ray"] - 1, AIMS["ray"]).met is True
    assert Timed("ray", 2, CALLS, AIMS["ray"] + 1, AIMS["ray"]).met is False
    assert Timed("ray", 2, ANSWERS, AIMS["ray"] + 1, AIMS["ray"]).met is None
