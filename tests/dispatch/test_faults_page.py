"""The tests that docs/guides/cluster.md names for faults exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides/cluster.md").read_text(encoding="utf-8")


def test_every_fault_is_held_by_a_test() -> None:
    lines = PAGE.partition("## Faults and their tests")[2].partition("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.endswith("| its test |")]
    assert len(rows) > 12
    for row in rows:
        held = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row.split(" | ")[-1])
        assert held, row
        for file, name in held:
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
