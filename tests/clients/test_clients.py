"""Coding agents and the AI SDK run against the endpoint as their packages install them. Their page says what came out.

Each calls the model, the model calls one of its tools, and the next turn begins with the exact ids of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.document import PAGE, label_program, label_sdk, row
from tests.clients.programs import PROGRAMS, play_program
from tests.clients.suite import SDK_APIS, Outcome, play_ai_sdk
from tests.clients.thinking import LOOK, ThinkingWorld, thinking_world
from tests.components import require_clients

pytestmark = [pytest.mark.integration, pytest.mark.slow]
IN_SMOKE = ("claude_code", "codex")


def assert_on_page(label: str, outcome: Outcome) -> None:
    found = row(label, outcome)
    assert found in PAGE.read_text(encoding="utf-8").splitlines(), f"{found}\n`python -m tests.clients.document`"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke if name in IN_SMOKE else ()) for name in PROGRAMS]
)
def test_a_program_does_what_its_page_says(name: str, tmp_path: Path) -> None:
    assert_on_page(label_program(name), play_program(PROGRAMS[name], tmp_path))


@pytest.fixture(scope="module")
def thinking() -> Iterator[ThinkingWorld]:
    """The endpoint of the AI SDK."""
    require_clients()
    with thinking_world(LOOK) as world:
        yield world


@pytest.mark.parametrize("api", SDK_APIS)
def test_the_ai_sdk_does_what_its_page_says(thinking: ThinkingWorld, api: str) -> None:
    assert_on_page(label_sdk(api), play_ai_sdk(thinking.world, api, require_clients()))
