"""Run all Python clients, and write what came out into their page: `python -m tests.clients.document`."""

from __future__ import annotations

from pathlib import Path

from etude.rollout.python_environments import ensure_environment
from tests.clients.suite import CLIENTS, FEATURES, PINNED, PINS, Outcome, play, suite_world

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "agent-clients.md"
BEGIN, END = "<!-- tests.clients.document: begin -->", "<!-- tests.clients.document: end -->"
HEADINGS = {"exact": "second turn exact", "error": "error shown", "drop": "dropped stream recorded"}
HEAD = f"| client | {' | '.join(HEADINGS.get(name, name) for name in FEATURES)} |"


def label(client: str) -> str:
    """Return the packages of a client, each with its pinned version."""
    versions = dict(pin.split("==") for pin in PINS)
    return " with ".join(f"`{package}` {versions[package]}" for package in CLIENTS[client])


def row(client: str, outcome: Outcome) -> str:
    """Return the line of a client in the table."""
    return f"| {label(client)} | {' | '.join(outcome.cells)} |"


def main() -> None:
    """Write the table."""
    python = ensure_environment(PINNED).python
    with suite_world() as world:
        rows = [row(client, play(world, client, python)) for client in CLIENTS]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    lines = [BEGIN, "", HEAD, f"|{'---|' * (len(FEATURES) + 1)}", *rows, "", END]
    PAGE.write_text(before + "\n".join(lines) + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
