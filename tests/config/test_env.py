"""The process environment, read in one place."""

from __future__ import annotations

import pytest

from etude.config import env
from etude.errors import ConfigError


def test_text_gives_the_value_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_TEST", "here")
    assert env.text("ETUDE_TEST", "default") == "here"
    monkeypatch.delenv("ETUDE_TEST")
    assert env.text("ETUDE_TEST", "default") == "default"


@pytest.mark.parametrize(("value", "says"), [("1", True), ("Yes", True), ("0", False), ("", False), ("off", False)])
def test_flag(monkeypatch: pytest.MonkeyPatch, value: str, says: bool) -> None:
    monkeypatch.setenv("ETUDE_TEST", value)
    assert env.flag("ETUDE_TEST") is says


def test_flag_refuses_what_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_TEST", "perhaps")
    with pytest.raises(ConfigError, match=r"ETUDE_TEST expects 1 or 0, and is set to something else\. Set it to one\."):
        env.flag("ETUDE_TEST")


def test_require_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_TEST", "here")
    assert env.require("ETUDE_TEST") == "here"
    monkeypatch.delenv("ETUDE_TEST")
    with pytest.raises(ConfigError, match=r"ETUDE_TEST is needed and not set"):
        env.require("ETUDE_TEST")


def test_required_components(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_REQUIRE", "ray, postgres,,")
    assert env.required_components() == {"ray", "postgres"}
    monkeypatch.delenv("ETUDE_REQUIRE")
    assert env.required_components() == frozenset()
