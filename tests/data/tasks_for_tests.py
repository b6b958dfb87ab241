"""Data that tests name as `module:Name`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
NUMBER = 7


def made() -> Iterator[dict[str, Any]]:
    """Yield rows that are generated on demand."""
    yield from ({"prompt": f"{n}+{n}?", "answer": str(2 * n)} for n in range(5))
