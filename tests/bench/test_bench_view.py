"""The benchmark of the viewer, on a run of two steps."""

from __future__ import annotations

import json
from pathlib import Path

from bench.view import main


def test_every_query_is_asked_and_the_run_is_used_again(tmp_path: Path) -> None:
    words = ["--steps", "2", "--tokens", "8", "--rounds", "2", "--directory", str(tmp_path / "run")]
    assert main(words) == 0
    written = (tmp_path / "run" / "journal.sqlite").stat().st_mtime
    assert main([*words, "--json", str(tmp_path / "figures.json")]) == 0
    assert (tmp_path / "run" / "journal.sqlite").stat().st_mtime == written
    whole = json.loads((tmp_path / "figures.json").read_text())
    assert {case["name"] for case in whole["cases"]} >= {"first page", "curves", "step", "rollout", "tokens"}
    assert all(case["bytes"] > 50 and case["wall"] > 0 for case in whole["cases"]) and whole["memory"] > 2**20
