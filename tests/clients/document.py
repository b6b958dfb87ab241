"""Run all clients, and write what came out into their page: `python -m tests.clients.document`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from etude.rollout.python_environments import ensure_environment
from tests.clients.programs import PROGRAMS, play_program
from tests.clients.suite import (
    CLIENTS,
    FEATURES,
    PINNED,
    PINS,
    SDK_APIS,
    Outcome,
    play_ai_sdk,
    play_client,
    suite_world,
)
from tests.clients.thinking import LOOK, thinking_world
from tests.npm import CODING, installed, versions

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "agent-clients.md"
BEGIN, END = "<!-- tests.clients.document: begin -->", "<!-- tests.clients.document: end -->"
HEADINGS = {"exact": "second turn exact", "error": "error shown", "drop": "dropped answer recorded"}
HEAD = f"| client | {' | '.join(HEADINGS.get(name, name) for name in FEATURES)} |"


def label_program(name: str) -> str:
    """Return a program's name if its package has another, the package, and the pinned version."""
    program = PROGRAMS[name]
    name = "" if program.title == program.package else f"{program.title}: "
    return name + _versioned(program.package)


def label_sdk(api: str) -> str:
    """Return the packages of the AI SDK, and the API that it is run with."""
    return f"AI SDK, {api}: {_versioned('ai')} with {_versioned('@ai-sdk/openai')}"


def label(client: str) -> str:
    """Return the packages of a client, each with its pinned version."""
    return " with ".join(_versioned(package) for package in CLIENTS[client])


def row(label: str, outcome: Outcome) -> str:
    """Return the line of a client in the table."""
    return f"| {label} | {' | '.join(outcome.cells)} |"


def _versioned(package: str) -> str:
    known = dict(pin.split("==") for pin in PINS) | versions() | versions(CODING)
    return f"`{package}` {known[package]}"


def main() -> None:
    """Write the table."""
    python, modules = ensure_environment(PINNED).python, installed()
    installed(CODING)
    rows = []
    for name, program in PROGRAMS.items():
        with TemporaryDirectory(prefix="etude-program-") as directory:
            rows.append(row(label_program(name), play_program(program, Path(directory))))
    with thinking_world(LOOK) as world:
        rows += [row(label_sdk(api), play_ai_sdk(world.world, api, modules)) for api in SDK_APIS]
    with suite_world() as endpoint:
        rows += [row(label(client), play_client(endpoint, client, python)) for client in CLIENTS]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    lines = [BEGIN, "", HEAD, f"|{'---|' * (len(FEATURES) + 1)}", *rows, "", END]
    PAGE.write_text(before + "\n".join(lines) + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
