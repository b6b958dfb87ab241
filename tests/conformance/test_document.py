"""The pages on conformance are complete and up to date."""

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
def test_every_registered_name_has_a_row_with_checks(
    registry: dict[str, object], table: dict[str, checks.Item]
) -> None:
    """Each registered name has a row, each row has checks, and each row has a registered name."""
    assert registry.keys() == table.keys()
    assert all(item.checks for item in table.values())


def test_every_check_is_on_the_page() -> None:
    """Each test of a file of checks is named by a row."""
    listed = {check for table in checks.CHECKS.values() for item in table.values() for check in item.checks}
    modules = {sys.modules[check.__module__] for check in listed}
    tests_of_modules = {
        thing
        for module in modules
        for name, thing in vars(module).items()
        if name.startswith("test_") and thing.__module__ == module.__name__
    }
    assert tests_of_modules == listed


def test_the_pages_are_up_to_date() -> None:
    for path, page in document.PAGES.items():
        message = f"{path.name} is stale: run `python -m tests.conformance.document`"
        assert path.read_text(encoding="utf-8") == page(), message
