"""The page for users of Agent Lightning has all of its public names, and names things of Etude that exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.house.documents import INLINE, ROOT

NAMES = Path(__file__).with_name("agent_lightning.txt").read_text(encoding="utf-8").splitlines()[1:]


def exists(name: str) -> bool:
    """Return whether a dotted name can be imported."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def test_the_page_has_every_public_name_once_beside_things_that_exist() -> None:
    page = (ROOT / "docs/start/coming-from-agent-lightning.md").read_text(encoding="utf-8")
    lines = [line for line in page.partition("## Every public name")[2].splitlines() if line.startswith("| `")]
    cells = [line.strip("| ").split(" | ", 1) for line in lines]
    assert sorted(name for theirs, _ in cells for name in INLINE.findall(theirs)) == sorted(NAMES)
    ours = {code for _, right in cells for code in INLINE.findall(right) if re.fullmatch(r"etude(\.\w+)+", code)}
    assert len(ours) > 15 and [name for name in ours if not exists(name)] == []
