"""The incremental windows of steps equal those of a walk over all groups."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.recipes.collect.step_windows import StepWindows


def walk(line: list[bool | None], size: int, longest: int) -> list[int]:
    """Return the ends of the windows, by definition. None is undecided, and counts as usable."""
    ends, length, candidates = [], 0, 0
    for position, usable in enumerate(line):
        length, candidates = length + 1, candidates + (usable is not False)
        if candidates == size or length == longest:
            ends.append(position + 1)
            length = candidates = 0
    return ends


@given(seed=st.integers(0, 10**9), size=st.integers(1, 5), factor=st.integers(1, 3), failing=st.floats(0, 1))
@settings(max_examples=80)
def test_windows_equal_those_of_a_walk(seed: int, size: int, factor: int, failing: float) -> None:
    rng = random.Random(seed)
    windows = StepWindows(size, size * factor)
    line: list[bool | None] = []
    for _ in range(80):
        undecided = [position for position in range(len(line)) if line[position] is None]
        if undecided and rng.random() < 0.55:
            position = rng.choice(undecided)
            line[position] = rng.random() >= failing
            windows.decide(position, usable=bool(line[position]))
        else:
            assert windows.append() == len(line)
            line.append(None)
        ends = walk(line, size, size * factor)
        assert windows.closed == len(ends) and windows.first_end == (ends[0] if ends else len(line))
        assert [windows.before(position) for position in range(len(line))] == [
            sum(end <= position for end in ends) for position in range(len(line))
        ]
        assert windows.first_is_decided == (bool(ends) and None not in line[: ends[0]])


@given(seed=st.integers(0, 10**9), size=st.integers(1, 4), factor=st.integers(1, 3))
@settings(max_examples=40)
def test_no_group_moves_into_a_later_window(seed: int, size: int, factor: int) -> None:
    """A group is trained at the step of its window at issue, or earlier."""
    rng = random.Random(seed)
    windows = StepWindows(size, size * factor)
    positions = [windows.append() for _ in range(40)]
    before = {position: windows.before(position) for position in positions}
    for position in rng.sample(positions, 30):
        windows.decide(position, usable=rng.random() < 0.4)
        now = {position: windows.before(position) for position in positions}
        assert all(now[position] <= before[position] for position in positions)
        before = now


def test_a_usable_group_may_be_ruled_out_later() -> None:
    windows = StepWindows(2, 4)
    for position in range(5):
        windows.append()
        windows.decide(position, usable=True)
    assert windows.closed == 2 and windows.first_end == 2
    windows.decide(0, usable=False)
    assert windows.closed == 2 and windows.first_end == 3 and windows.first_is_decided
    windows.decide(1, usable=False)
    assert windows.closed == 1 and windows.first_end == 4


def test_each_end_passes_each_group_once() -> None:
    """The cost of a run is its groups times its windows, also if all groups of a window fail late."""
    moves: list[int] = []

    class Counted(StepWindows):
        def _take(self, window: object, position: int) -> None:
            moves.append(position)
            super()._take(window, position)  # type: ignore[arg-type]

    windows, ahead, groups = Counted(8, 16), 50, 0
    while windows.closed < ahead:
        windows.append()
        groups += 1
    for position in range(groups):
        windows.decide(position, usable=position % 3 == 0)
    assert len(moves) <= groups * (ahead + 1)
