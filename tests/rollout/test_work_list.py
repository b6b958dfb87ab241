"""The list of work has each key that a row sees once, by blocks that the row holds, and changes only when it must."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rollout.work_list import IntArray, WorkList

SPLIT, SIZE, ROWS = 16, 4, 3


def held_contexts(prompts: list[int], answers: list[tuple[int, int]]) -> tuple[IntArray, IntArray]:
    """Return the table and the positions of requests that answer prompts: full blocks of a prompt are held by all.

    answers: the prompt of each, and the number of its tokens behind it.
    """
    blocks = iter(range(10_000))
    shared = [[next(blocks) for _ in range(length // SIZE)] for length in prompts]
    lengths = [prompts[prompt] + own for prompt, own in answers]
    table = np.zeros((len(answers) + 1, -(-max(lengths) // SIZE)), dtype=np.int64)
    for slot, ((prompt, _), length) in enumerate(zip(answers, lengths, strict=True)):
        common = shared[prompt]
        own = [next(blocks) for _ in range(-(-length // SIZE) - len(common))]
        table[slot, : len(common) + len(own)] = common + own
    return table, np.array(lengths) - 1


def check(entries: np.ndarray, slots: IntArray, positions: IntArray, table: IntArray) -> None:
    """Each visible key of each row is in one entry of the row, and the first row of the entry has its block."""
    covered: Counter[tuple[int, int]] = Counter()
    for split, *members in entries.tolist():
        rows = [row for row in members if row >= 0]
        assert rows == members[: len(rows)] and rows, "the rows stand in front"
        for row in rows:
            keys = range(split * SPLIT, min(split * SPLIT + SPLIT, int(positions[row]) + 1))
            assert keys, "a row sees a key of each split that it is given"
            for key in keys:
                assert table[slots[rows[0]], key // SIZE] == table[slots[row], key // SIZE]
            covered.update((row, key) for key in keys)
    assert covered == Counter((row, key) for row in range(len(slots)) for key in range(int(positions[row]) + 1))


@st.composite
def requests(draw: st.DrawFn) -> tuple[IntArray, IntArray, IntArray]:
    """The slots, positions and table of a step: answers to prompts, tokens of chunks, and rows of the scratch slot."""
    prompts = draw(st.lists(st.integers(1, 50), min_size=1, max_size=3))
    answer = st.tuples(st.integers(0, len(prompts) - 1), st.integers(1, 40))
    table, newest = held_contexts(prompts, draw(st.lists(answer, min_size=1, max_size=6)))
    tokens = [draw(st.integers(1, min(5, int(position) + 1))) for position in newest]
    order = draw(st.permutations(range(len(newest))))
    scratch = draw(st.integers(0, 4))
    slots = [slot for slot in order for _ in range(tokens[slot])] + [len(newest)] * scratch
    positions = [int(newest[slot]) - back for slot in order for back in range(tokens[slot])] + [0] * scratch
    return np.array(slots), np.array(positions), table


@given(requests())
def test_each_visible_key_is_covered_once(step: tuple[IntArray, IntArray, IntArray]) -> None:
    slots, positions, table = step
    work = WorkList(split=SPLIT, block_size=SIZE, rows_per_entry=ROWS)
    assert work.update(slots, positions, table)
    check(work.entries, slots, positions, table)


def test_answers_share_the_whole_splits_of_their_prompt() -> None:
    table, positions = held_contexts([40], [(0, 2), (0, 5), (0, 3), (0, 4)])
    work = WorkList(split=SPLIT, block_size=SIZE, rows_per_entry=ROWS)
    work.update(np.arange(4), positions, table)
    assert [entry for entry in work.entries.tolist() if entry[0] < 2] == [
        *([0, 0, 1, 2], [0, 3, -1, -1]),
        *([1, 0, 1, 2], [1, 3, -1, -1]),
    ]
    assert len(work.entries) == 4 + 4, "the third split has tokens of each answer's own"


def test_the_list_changes_when_a_row_enters_a_split_joins_or_leaves() -> None:
    table, positions = held_contexts([20], [(0, 40), (0, 60)])
    slots = np.arange(2)
    positions = np.array([20, 28])
    work = WorkList(split=SPLIT, block_size=SIZE, rows_per_entry=ROWS)
    changed = []
    for _ in range(8):
        changed.append(work.update(slots, positions, table))
        check(work.entries, slots, positions, table)
        positions = positions + 1
    assert changed == [True, False, False, False, True, False, False, False]  # the second row reaches 32
    assert work.update(slots[:1], positions[:1], table)
    assert work.update(slots, positions, table)


def test_another_request_in_the_slot_has_entries_of_its_own() -> None:
    """It has as many splits as the one before it, and none of its blocks."""
    table, positions = held_contexts([20], [(0, 1), (0, 1)])
    work = WorkList(split=SPLIT, block_size=SIZE, rows_per_entry=ROWS)
    work.update(np.arange(2), positions, table)
    assert work.entries[0].tolist() == [0, 0, 1, -1]
    table[1, :5] = np.arange(900, 905)
    assert work.update(np.arange(2), positions, table)
    check(work.entries, np.arange(2), positions, table)
    assert work.entries[0].tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize("rows", [1, 8])
def test_an_entry_has_as_many_rows_as_the_kernel_takes(rows: int) -> None:
    work = WorkList(split=SPLIT, block_size=SIZE, rows_per_entry=rows)
    work.update(np.zeros(5, dtype=np.int64), np.arange(5), np.zeros((1, 4), dtype=np.int64))
    assert work.entries.shape == (-(-5 // rows), 1 + rows)
