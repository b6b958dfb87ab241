"""The tests that docs/guides/agents.md names for faults exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides/agents.md").read_text(encoding="utf-8")


def test_every_fault_is_held_by_a_test() -> None:
    lines = PAGE.partition("## When something breaks")[2].partition("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.endswith("| held by |")]
    held = [re.fullmatch(r"\| .+ \| .+ \| `(tests/[\w/]+\.py)::(test_\w+)` \|", row) for row in rows]
    assert len(rows) > 25 and all(held)
    for match in held:
        assert match is not None
        file, name = match.groups()
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), match[0]
