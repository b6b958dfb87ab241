"""Checks the format of the viewer's pages and lints them, by the biome of the lock file beside this module.

Usage: python -m tests.view.lint [--write]

Without biome nothing is checked, unless ETUDE_REQUIRE names `npm`: then it is installed. `--write` formats the pages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.components import required_components
from tests.npm import installed, place

PINS = Path(__file__).parent


def main(*options: str) -> int:
    """Run biome, and return its exit status."""
    folder = installed(PINS) if "npm" in required_components() else place(PINS)
    if folder is None or not (folder / "whole.json").exists():
        print("The viewer's pages are not checked: biome is missing. ETUDE_REQUIRE=npm make lint installs it.")
        return 0
    biome = folder / "node_modules" / ".bin" / "biome"
    return subprocess.run([biome, "check", "--error-on-warnings", *options], cwd=PINS.parents[1]).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
