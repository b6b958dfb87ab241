"""The windows of steps: kept up to date, they are those of a walk over the whole line."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.recipes.collect.step_windows import StepWindows


def walk(line: list[bool | None], start: int, size: int, longest: int) -> list[int]:
    """The ends of the windows from a place on, by their definition. None is undecided, and counts as usable."""
    ends, length, candidates = [], 0, 0
    for place in range(start, len(line)):
        length, candidates = length + 1, candidates + (line[place] is not False)
        if candidates == size or length == longest:
            ends.append(place + 1)
            length = candidates = 0
    return ends


@given(seed=st.integers(0, 10**9), size=st.integers(1, 5), factor=st.integers(1, 3), failing=st.floats(0, 1))
@settings(max_examples=80)
def test_windows_are_those_of_a_plain_walk(seed: int, size: int, factor: int, failing: float) -> None:
    chance = random.Random(seed)
    windows, start = StepWindows(size, size * factor), 0
    line: list[bool | None] = []
    for _ in range(80):
        undecided = [place for place in range(start, len(line)) if line[place] is None]
        if undecided and chance.random() < 0.55:
            place = chance.choice(undecided)
            line[place] = chance.random() >= failing
            windows.decide(place, usable=bool(line[place]))
        elif windows.closed and chance.random() < 0.1:
            start = windows.take_first()
        else:
            assert windows.append() == len(line)
            line.append(None)
        ends = walk(line, start, size, size * factor)
        assert windows.closed == len(ends) and windows.first_end == (ends[0] if ends else len(line))
        assert [windows.before(place) for place in range(start, len(line))] == [
            sum(end <= place for end in ends) for place in range(start, len(line))
        ]
        assert windows.first_is_decided == (bool(ends) and None not in line[start : ends[0]])


@given(seed=st.integers(0, 10**9), size=st.integers(1, 4), factor=st.integers(1, 3))
@settings(max_examples=40)
def test_no_group_comes_into_a_later_window(seed: int, size: int, factor: int) -> None:
    """A group is trained at the step that its window said when it was issued, or before."""
    chance = random.Random(seed)
    windows = StepWindows(size, size * factor)
    places = [windows.append() for _ in range(40)]
    before = {place: windows.before(place) for place in places}
    for place in chance.sample(places, 30):
        windows.decide(place, usable=chance.random() < 0.4)
        now = {place: windows.before(place) for place in places}
        assert all(now[place] <= before[place] for place in places)
        before = now


def test_a_group_that_can_be_trained_on_may_be_ruled_out_later() -> None:
    windows = StepWindows(2, 4)
    for place in range(5):
        windows.append()
        windows.decide(place, usable=True)
    assert windows.closed == 2 and windows.first_end == 2
    windows.decide(0, usable=False)
    assert windows.closed == 2 and windows.first_end == 3 and windows.first_is_decided
    windows.decide(1, usable=False)
    assert windows.closed == 1 and windows.first_end == 4


def test_ends_move_over_each_group_once_for_each_window() -> None:
    """The cost of a run is its groups times its windows, also where all groups of a window fail late."""
    moves: list[int] = []

    class Counted(StepWindows):
        def _take(self, window: object, place: int) -> None:
            moves.append(place)
            super()._take(window, place)  # type: ignore[arg-type]

    groups, size, ahead = 2000, 8, 5
    windows, issued, decided = Counted(size, 2 * size), 0, 0
    while issued < groups:
        while windows.closed < ahead:
            windows.append()
            issued += 1
        while decided < windows.first_end:
            windows.decide(decided, usable=decided % 3 == 0)
            decided += 1
        if windows.first_is_decided:
            windows.take_first()
    assert len(moves) <= groups * (ahead + 2)
