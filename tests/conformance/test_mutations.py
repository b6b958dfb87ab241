"""The suite bites: each of these mistakes, one at a time, is found by the check that is named beside it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.conformance import mutations_of_advantages, mutations_of_losses, mutations_of_others
from tests.conformance.mutations import Mutation, applied, bites, plain

MUTATIONS = [*mutations_of_advantages.MUTATIONS, *mutations_of_losses.MUTATIONS, *mutations_of_others.MUTATIONS]


def told() -> Iterator[object]:
    """Every mutation; in `make check` the first of those that one check finds."""
    seen: set[object] = set()
    for mutation in MUTATIONS:
        check = mutation.check.func if isinstance(mutation.check, partial) else mutation.check
        yield pytest.param(mutation, id=mutation.name, marks=[pytest.mark.slow] if check in seen else [])
        seen.add(check)


@pytest.mark.parametrize("mutation", [*told()])
def test_the_named_check_finds_the_mistake(mutation: Mutation) -> None:
    bites(mutation)


def test_a_mistake_is_taken_out_again() -> None:
    mutation = MUTATIONS[0]
    sound = plain(mutation.function).__code__
    with applied(mutation):
        assert plain(mutation.function).__code__ is not sound
    assert plain(mutation.function).__code__ is sound
    mutation.check()
