"""Each of these mistakes, one at a time, is found by the check that is named with it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.conformance import (
    mutations_of_advantages,
    mutations_of_losses,
    mutations_of_others,
    mutations_of_sampling,
)
from tests.conformance.mutations import Mutation, applied, assert_found, unwrapped

MUTATIONS = [
    *mutations_of_advantages.MUTATIONS,
    *mutations_of_losses.MUTATIONS,
    *mutations_of_others.MUTATIONS,
    *mutations_of_sampling.MUTATIONS,
]


def mutation_params() -> Iterator[object]:
    """Yield every mutation. In `make check`, only the first mutation of each check runs."""
    seen: set[object] = set()
    for mutation in MUTATIONS:
        check = mutation.check.func if isinstance(mutation.check, partial) else mutation.check
        yield pytest.param(mutation, id=mutation.name, marks=[pytest.mark.slow] if check in seen else [])
        seen.add(check)


@pytest.mark.parametrize("mutation", [*mutation_params()])
def test_the_named_check_finds_the_mistake(mutation: Mutation) -> None:
    assert_found(mutation)


def test_a_mutation_is_undone_after_the_check() -> None:
    mutation = MUTATIONS[0]
    intact = unwrapped(mutation.function).__code__
    with applied(mutation):
        assert unwrapped(mutation.function).__code__ is not intact
    assert unwrapped(mutation.function).__code__ is intact
    mutation.check()
