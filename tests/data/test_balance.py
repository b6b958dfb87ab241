"""Every item is in one part, and the parts cost about the same."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etude.data.partition import balance

costs = st.lists(st.one_of(st.integers(0, 50).map(float), st.floats(0, 1e3)), max_size=40)


def loads(costs: list[float], division: list[list[int]]) -> list[float]:
    """Return the cost of each part."""
    return [sum(costs[i] for i in part) for part in division]


@given(costs, st.integers(1, 9))
def test_every_item_is_in_exactly_one_part(item_costs: list[float], parts: int) -> None:
    division = balance(item_costs, parts)
    assert len(division) == parts
    assert sorted(i for part in division for i in part) == list(range(len(item_costs)))
    assert all(part == sorted(part) for part in division)
    assert division == balance(np.array(item_costs), parts)


@given(st.lists(st.integers(0, 50).map(float), min_size=1, max_size=40), st.integers(1, 9))
def test_no_two_parts_differ_by_more_than_the_most_expensive_item(item_costs: list[float], parts: int) -> None:
    part_loads = loads(item_costs, balance(item_costs, parts))
    assert max(part_loads) - min(part_loads) <= max(item_costs)


@given(st.lists(st.integers(0, 30).map(float), min_size=1, max_size=8))
def test_two_parts_are_near_the_best_possible_division(item_costs: list[float]) -> None:
    best = min(
        max(loads(item_costs, [*_halves(item_costs, sides)])) for sides in product((0, 1), repeat=len(item_costs))
    )
    # The method's known bound for two parts.
    assert max(loads(item_costs, balance(item_costs, 2))) <= best * 7 / 6 + 1e-9


def _halves(costs: list[float], sides: tuple[int, ...]) -> list[list[int]]:
    return [[i for i in range(len(costs)) if sides[i] == side] for side in (0, 1)]


def test_mixed_lengths_come_out_far_closer_than_in_order() -> None:
    lengths = np.random.default_rng(0).integers(50, 4000, 256)
    item_costs = (lengths + 1e-3 * lengths**2).tolist()
    part_loads = loads(item_costs, balance(item_costs, 8))
    dealt = loads(item_costs, [list(range(part, 256, 8)) for part in range(8)])
    assert max(part_loads) / min(part_loads) < 1.001
    assert max(dealt) / min(dealt) > 1.1
