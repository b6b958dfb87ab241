"""Write the pages that are generated from the code: `python -m tests.pages.document`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.pages import algorithms, configuration, recipes

__all__ = ["PAGES"]

DOCS = Path(__file__).parents[2] / "docs"
PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "reference/recipes.md": recipes.page,
    DOCS / "reference/configuration.md": configuration.page,
    DOCS / "reference/algorithms.md": algorithms.page,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
