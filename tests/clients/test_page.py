"""docs/guides/agent-clients.md names the tested clients."""

from __future__ import annotations

from tests.clients.document import PAGE, label, label_program, label_sdk
from tests.clients.programs import PROGRAMS
from tests.clients.suite import CLIENTS, SDK_APIS


def test_the_page_names_the_versions() -> None:
    page = PAGE.read_text(encoding="utf-8")
    labels = [*map(label_program, PROGRAMS), *map(label_sdk, SDK_APIS), *map(label, CLIENTS)]
    for name in labels:
        assert f"| {name} |" in page, "`python -m tests.clients.document` writes the table"
