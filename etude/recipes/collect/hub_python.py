"""The Python that plays the environments of a hub: an environment of its own, where one was installed."""

from __future__ import annotations

import sys
from pathlib import Path

from etude.agents.hubs.process import PINS
from etude.rollout.python_environments import PackagePins, PythonEnvironment, find_environment


def hub_pins(hub: str) -> PackagePins | None:
    """Return the packages of a hub; None for one that needs none."""
    file = PINS / f"{hub}.txt"
    if not file.exists():
        return None
    lines = file.read_text(encoding="utf-8").splitlines()
    return PackagePins(f"hub-{hub}", tuple(line for line in lines if line and not line.startswith("#")))


def find_hub_environment(hub: str) -> PythonEnvironment | None:
    """Return the hub's own environment, installed or not; None for a hub that needs none."""
    pins = hub_pins(hub)
    return None if pins is None else find_environment(pins)


def hub_python(hub: str) -> Path:
    """Return the Python of the hub's own environment, if it is installed; else the one that runs this."""
    environment = find_hub_environment(hub)
    if environment is not None and environment.is_complete:
        return environment.python
    return Path(sys.executable)
