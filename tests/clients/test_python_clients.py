"""Clients of PyPI run against the endpoint as they are installed. Their page says what came out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agents.proxy.world import World
from tests.clients.document import PAGE, label, row
from tests.clients.suite import CLIENTS, PINNED, play_client, suite_world
from tests.components import require_python_clients

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[World]:
    """The endpoint of all clients, whose model costs some seconds."""
    require_python_clients(PINNED)
    with suite_world() as world:
        yield world


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_does_what_its_page_says(endpoint: World, client: str) -> None:
    found = row(label(client), play_client(endpoint, client, require_python_clients(PINNED)))
    assert found in PAGE.read_text(encoding="utf-8").splitlines(), f"{found}\n`python -m tests.clients.document`"
