"""Create the environments that integration tests need and ETUDE_REQUIRE names, one after another.

Usage: python -m tests.environments

Each takes minutes to install; with them ready, no test waits. A failed one does not stop the others.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from etude.errors import EtudeError
from tests.components import (
    ENVIRONMENTS,
    install_chromium,
    require_environment,
    require_hub,
    require_python_clients,
    required_components,
)


def main() -> int:
    """Create the missing environments; exit with 1 if one fails."""
    failed = 0
    for name in sorted(ENVIRONMENTS.keys() & required_components()):
        began = time.monotonic()
        try:
            folder = make(name)
        except (EtudeError, pytest.fail.Exception) as error:
            failed += 1
            print(f"environments: {name} could not be made. {error}", flush=True)
        else:
            print(f"environments: {name} is in {folder}, after {time.monotonic() - began:.0f} s.", flush=True)
    return int(failed > 0)


def make(name: str) -> Path:
    """Return the folder of an environment, or the path of a program; create it if it is missing."""
    if name == "npm":
        from tests.npm import CODING, installed

        installed(CODING)
        return installed()
    if name == "clients":
        from tests.clients.suite import PINNED

        return require_python_clients(PINNED)
    if name == "hubs":
        from etude.agents.hubs.process import PINS

        return [require_hub(file.stem) for file in sorted(PINS.glob("*.txt"))][-1]
    if name == "chromium":
        return Path(install_chromium())
    return require_environment(name).directory


if __name__ == "__main__":
    sys.exit(main())
