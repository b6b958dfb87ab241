"""The sum of a GPU's memory that leaves the rest to keys and values."""

from __future__ import annotations

import pytest

from etude.rollout.kv_budget import GIB, KvBudget


@pytest.mark.parametrize(
    ("total", "planned", "useful", "size"), [(80, 38, 100, 40), (80, 38, 12, 12), (16, 9, 100, 6), (80, 79, 100, 0)]
)
def test_keys_and_values_get_the_rest_but_no_more_than_requests_can_fill(
    total: int, planned: int, useful: int, size: int
) -> None:
    budget = KvBudget(total * GIB, planned * GIB, "updating", useful * GIB)
    assert budget.size == size * GIB


def test_each_term_is_named() -> None:
    terms = KvBudget(80 * GIB, 38 * GIB, "updating", 12 * GIB).describe()
    assert terms == (
        "80 GiB of the GPU − 38 GiB for the run without keys and values (updating) − 2 GiB kept free = 40 GiB, and "
        "requests can fill 12 GiB"
    )
