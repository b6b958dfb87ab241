"""docs/guides/agent-clients.md names the tested clients."""

from __future__ import annotations

from tests.clients.document import PAGE, label
from tests.clients.suite import CLIENTS
from tests.npm import CODING, versions


def test_the_page_names_the_versions() -> None:
    page = PAGE.read_text(encoding="utf-8")
    tested = versions() | versions(CODING)
    assert tested.pop("zod"), "which only the agent's own schema is of"
    for name, version in tested.items():
        assert f"`{name}` {version}" in page
    for client in CLIENTS:
        assert f"| {label(client)} |" in page, "`python -m tests.clients.document` writes the table"
