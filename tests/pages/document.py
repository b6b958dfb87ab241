"""Write the pages that are generated from the code: `python -m tests.pages.document`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etude.tools.shell_completion.suggest import OPTIONS_FILE
from tests.pages import algorithms, completion, configuration, recipes

__all__ = ["PAGES"]

DOCS = Path(__file__).parents[2] / "docs"
PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "reference/recipes.md": recipes.page,
    DOCS / "reference/configuration.md": configuration.page,
    DOCS / "reference/algorithms.md": algorithms.page,
    OPTIONS_FILE: completion.page,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
