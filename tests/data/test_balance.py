"""Every item is in one part, and the parts cost about the same."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data.balance import balance
from etude.errors import ConfigError

costs = st.lists(st.one_of(st.integers(0, 50).map(float), st.floats(0, 1e3)), max_size=40)


def loads(given: list[float], division: list[list[int]]) -> list[float]:
    """What each part costs."""
    return [sum(given[i] for i in part) for part in division]


@given(costs, st.integers(1, 9))
def test_every_item_is_in_exactly_one_part(given: list[float], parts: int) -> None:
    division = balance(given, parts)
    assert len(division) == parts
    assert sorted(i for part in division for i in part) == list(range(len(given)))
    assert all(part == sorted(part) for part in division)
    assert division == balance(np.array(given), parts)


@given(st.lists(st.integers(0, 50).map(float), min_size=1, max_size=40), st.integers(1, 9))
def test_no_two_parts_differ_by_more_than_the_dearest_item(given: list[float], parts: int) -> None:
    found = loads(given, balance(given, parts))
    assert max(found) - min(found) <= max(given)


@given(st.lists(st.integers(0, 30).map(float), min_size=1, max_size=8))
def test_two_parts_are_near_the_best_there_is(given: list[float]) -> None:
    best = min(max(loads(given, [*_halves(given, sides)])) for sides in product((0, 1), repeat=len(given)))
    assert max(loads(given, balance(given, 2))) <= best * 7 / 6 + 1e-9  # the method's known bound for two parts


def _halves(given: list[float], sides: tuple[int, ...]) -> list[list[int]]:
    return [[i for i in range(len(given)) if sides[i] == side] for side in (0, 1)]


def test_mixed_lengths_come_out_far_closer_than_in_order() -> None:
    lengths = np.random.default_rng(0).integers(50, 4000, 256)
    given = (lengths + 1e-3 * lengths**2).tolist()
    found = loads(given, balance(given, 8))
    dealt = loads(given, [list(range(part, 256, 8)) for part in range(8)])
    assert max(found) / min(found) < 1.001
    assert max(dealt) / min(dealt) > 1.1


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 were asked for"):
        balance([1.0], 0)
    with pytest.raises(ConfigError, match=r"item 1 costs -2\.0"):
        balance([1.0, -2.0], 2)
    with pytest.raises(ConfigError, match="item 0 costs nan"):
        balance([float("nan")], 2)
