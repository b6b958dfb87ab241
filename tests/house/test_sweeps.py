"""A sweep tries every item in one test, and names those that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, is_hypothesis_test
from hypothesis import strategies as st

from tests.sweeps import SweepError, inner, later, sweep

SEEN: list[object] = []


@sweep("number", [1, 2, 3])
def test_every_item_is_tried(number: int, tmp_path: Path) -> None:
    SEEN.append((number, tmp_path.exists()))


def test_all_items_were_tried() -> None:
    assert SEEN in ([(1, True), (2, True), (3, True)], [])  # empty if this test runs alone


def test_each_failing_item_is_named_and_all_are_tried() -> None:
    @sweep(("name", "number"), [("one", 1), ("two", 2), ("three", 3)])
    def odd(name: str, number: int) -> None:
        assert number == 2, "is no two"

    with pytest.raises(AssertionError, match="2 of 3 fail: name=one, number=1; name=three, number=3") as caught:
        odd()
    assert isinstance(caught.value, SweepError)
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["This is of name=one, number=1."],
        ["This is of name=three, number=3."],
    ]
    odd("two", 2)
    odd(name="two", number=2)


def test_sweeps_can_be_nested_and_hold_properties() -> None:
    seen: set[tuple[str, int]] = set()

    @sweep("letter", ["a", "b"])
    @sweep("number", [1, 2])
    @given(drawn=st.booleans())
    def test(letter: str, number: int, drawn: bool) -> None:
        seen.add((letter, number))

    test()
    assert len(seen) == 4 and is_hypothesis_test(inner(test)) and not is_hypothesis_test(test)


def test_make_check_tries_the_first_values_and_make_test_all() -> None:
    one, two, *others = later([1, 2, (3, 4), 5, 6], every=4)
    assert (one, others[2]) == (1, 6)
    assert [(parameter.values, [mark.name for mark in parameter.marks]) for parameter in (two, *others[:2])] == [
        ((2,), ["slow"]),
        ((3, 4), ["slow"]),
        ((5,), ["slow"]),
    ]
