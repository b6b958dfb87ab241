"""Write the pages that are generated from the code: `python -m tests.pages.document`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etude.tools.shell_completion.suggest import OPTIONS_FILE
from tests.pages import algorithms, completion, configuration, llms, recipes

__all__ = ["PAGES"]

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
PAGES: dict[Path, Callable[[], str]] = {
    **{REFERENCE / "algorithms" / name: page for name, page in algorithms.PAGES.items()},
    **{REFERENCE / "configuration" / name: page for name, page in configuration.PAGES.items()},
    **{REFERENCE / "recipes" / name: page for name, page in recipes.PAGES.items()},
    OPTIONS_FILE: completion.page,
    ROOT / "llms.txt": llms.page,  # last, because it reads the others
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(page(), encoding="utf-8")
