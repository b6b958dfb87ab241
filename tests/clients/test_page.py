"""docs/guides/agent-clients.md names the tested clients."""

from __future__ import annotations

from pathlib import Path

from tests.npm import versions


def test_the_page_names_the_versions() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides/agent-clients.md").read_text(encoding="utf-8")
    tested = versions()
    assert tested.pop("zod"), "which only the agent's own schema is of"
    for name, version in tested.items():
        assert f"`{name}` {version}" in page
