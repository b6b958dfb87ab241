"""The suite bites: each of these mistakes, one at a time, is found by the check that is named beside it."""

from __future__ import annotations

import pytest

from tests.conformance import mutations_of_advantages, mutations_of_losses, mutations_of_others
from tests.conformance.mutations import Mutation, bites

MUTATIONS = [*mutations_of_advantages.MUTATIONS, *mutations_of_losses.MUTATIONS, *mutations_of_others.MUTATIONS]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_named_check_finds_the_mistake(mutation: Mutation) -> None:
    bites(mutation)
