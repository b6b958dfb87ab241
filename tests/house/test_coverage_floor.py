"""The coverage floor fails for a package that falls short, or that no test reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import coverage_floor


def report(**covered: int) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Return a report of files with 100 lines each, of which this many are covered."""
    return {
        "files": {
            path.replace("__", "/") + ".py": {"summary": {"covered_lines": lines, "num_statements": 100}}
            for path, lines in covered.items()
        }
    }


FULL = {"etude__algorithms__losses": 95, "etude__batch__pack": 100, "etude__config__check": 96}


def test_rooms_at_the_floor_pass() -> None:
    assert coverage_floor.shortfalls(report(**FULL)) == []


def test_a_room_below_the_floor_is_named_whatever_the_others_have() -> None:
    lines = coverage_floor.shortfalls(report(**{**FULL, "etude__algorithms__losses": 94}, etude__cli=100))
    assert lines == ["etude/algorithms/ has 94.0 % of its lines covered; at least 95 % are asked for."]


def test_a_room_counts_as_one() -> None:
    assert coverage_floor.covered(report(**FULL, etude__algorithms__kl=75), "etude/algorithms/") == 85.0


def test_a_room_without_a_line_is_named() -> None:
    lines = coverage_floor.shortfalls(report(etude__algorithms__losses=100, etude__batch=100))
    assert lines == ["etude/config/ has no line in the coverage report, so no test imported it."]


@pytest.mark.parametrize(("config", "code"), [(96, 0), (10, 1)])
def test_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: int, code: int) -> None:
    path = tmp_path / "coverage.json"
    path.write_text(json.dumps(report(**{**FULL, "etude__config__check": config})))
    assert coverage_floor.main(str(path)) == code
    assert f"{config}.0 %" in capsys.readouterr().out
