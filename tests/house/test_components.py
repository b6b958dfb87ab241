"""Optional components: a test without its component is skipped, and fails if the machine promised the component."""

from __future__ import annotations

import pytest

from tests.components import COMPONENTS, ENVIRONMENTS, require, required_components


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> str:
    """A component that no machine has."""
    monkeypatch.setitem(COMPONENTS, "absent", "no_package_has_this_name")
    return "absent"


def test_an_absent_component_skips_its_test(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_REQUIRE", "another")
    with pytest.raises(pytest.skip.Exception, match="absent is not installed"):
        require(absent)


def test_a_promised_component_fails_its_test(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_REQUIRE", "another,absent")
    with pytest.raises(pytest.fail.Exception, match="ETUDE_REQUIRE names 'absent', but the package"):
        require(absent)


def test_a_present_component_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPONENTS, "present", "json")
    monkeypatch.setenv("ETUDE_REQUIRE", "present")
    require("present")


def test_every_promised_component_is_known() -> None:
    """A misspelt name in ETUDE_REQUIRE would otherwise require nothing."""
    assert required_components() <= COMPONENTS.keys() | ENVIRONMENTS.keys()


def test_a_test_that_uses_a_server_must_be_integration() -> None:
    with pytest.raises(pytest.fail.Exception, match="This test uses postgres"):
        require("postgres")
