"""The process environment, read in one place."""

from __future__ import annotations

import pytest

from etude.config import env


def test_it_offers_only_what_is_used() -> None:
    assert env.__all__ == ["required_components"]


def test_required_components(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_REQUIRE", "ray, postgres,,")
    assert env.required_components() == {"ray", "postgres"}
    monkeypatch.delenv("ETUDE_REQUIRE")
    assert env.required_components() == frozenset()
