"""The page of conformance is complete and up to date."""

from __future__ import annotations

import sys

import pytest

from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.kl import CONTROLLERS, KLS
from etude.algorithms.losses import LOSSES, SUPERVISED
from tests.conformance import checks, document


@pytest.mark.parametrize(
    ("registry", "table"),
    [
        (ADVANTAGES, checks.ADVANTAGES),
        (LOSSES, checks.POLICY_LOSSES),
        ({**SUPERVISED, "echo": None}, checks.SUPERVISED),
        (KLS, checks.KLS),
        (CONTROLLERS, checks.CONTROLLERS),
    ],
    ids=["advantages", "losses", "supervised", "kl", "controllers"],
)
def test_everything_that_can_be_chosen_is_proven(registry: dict[str, object], table: dict[str, checks.Item]) -> None:
    """A name in a registry has a row, a row has checks, and no row is of something that is gone."""
    assert registry.keys() == table.keys()
    assert all(item.checks for item in table.values())


def test_every_check_is_on_the_page() -> None:
    """A test that no row names would prove something that nobody reads."""
    listed = {check for table in checks.CHECKS.values() for item in table.values() for check in item.checks}
    modules = {sys.modules[check.__module__] for check in listed}
    written = {
        thing
        for module in modules
        for name, thing in vars(module).items()
        if name.startswith("test_") and thing.__module__ == module.__name__
    }
    assert written == listed


def test_the_page_is_up_to_date() -> None:
    message = "docs/conformance.md is stale: run `python -m tests.conformance.document`"
    assert document.PAGE.read_text(encoding="utf-8") == document.page(), message
