"""Groups of requests in attention: each token once, prefix groups for shared blocks, bounded padding."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.rollout.attention_groups import (
    CPU_LIMITS,
    KEY_CHUNK,
    AttentionGroup,
    group_chunks,
    split_into_chunks,
)

SIZE = 16


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def groups_of(
    runs: list[tuple[int, int]], table: np.ndarray | None = None, block_bytes: int = 1024
) -> list[AttentionGroup]:
    """Return the groups of spans (start, stop), one request each, in different slots; nothing is shared unless the
    table says so."""
    start, stop = (column(*values) for values in zip(*runs, strict=True))
    first = np.cumsum(stop - start) - (stop - start)
    if table is None:
        table = np.arange(len(runs) * 64).reshape(len(runs), 64)
    pieces = split_into_chunks(first, start, stop, np.arange(len(runs)))
    return list(group_chunks(pieces, table, size=SIZE, block_bytes=block_bytes, heads=4))


def tokens_of(groups: list[AttentionGroup]) -> list[tuple[int, int, int]]:
    """Return (flat row, position, slot) of every real query, as often as it occurs."""
    tokens = []
    for group in groups:
        pieces = group.chunks
        for place in np.flatnonzero(group.real):
            for ahead in range(pieces.count[place]):
                position = int(pieces.end[place] - pieces.count[place]) + ahead
                tokens.append((int(pieces.row[place]) + ahead, position, int(pieces.slot[place])))
    return sorted(tokens)


def test_requests_that_generate_are_one_group() -> None:
    (group,) = groups_of([(length, length + 1) for length in (30, 33, 40, 47)])
    assert (group.prefix_groups, group.prefix_length, group.real.all()) == (4, 0, True)


def test_a_long_prompt_is_split_into_chunks_that_see_earlier_tokens() -> None:
    pieces = split_into_chunks(column(5, 305), column(40, 7), column(340, 8), column(3, 1))
    assert pieces.row.tolist() == [5, 133, 261, 305]
    assert pieces.count.tolist() == [128, 128, 44, 1]
    assert pieces.end.tolist() == [168, 296, 340, 8]
    assert pieces.slot.tolist() == [3, 3, 3, 1]


def test_short_and_long_do_not_share_a_group_where_padding_would_cost() -> None:
    groups = groups_of([(30, 31)] * 6 + [(900, 901)] * 2, block_bytes=1 << 19)
    assert sorted(len(group.chunks) for group in groups) == [1, 1, 6]


def test_requests_with_the_same_first_blocks_form_a_prefix_group() -> None:
    table = np.arange(5 * 64).reshape(5, 64)
    table[1, :20] = table[0, :20]  # 320 tokens: two runs of KEYS
    table[2, :10] = table[0, :10]  # 160: one run, but the others share more with each other
    table[4, :8] = table[3, :8]
    groups = groups_of([(400, 401), (350, 351), (300, 301), (128, 129), (300, 301)], table)
    shared = {tuple(sorted(group.chunks.slot.tolist())): group.prefix_length for group in groups}
    assert shared == {(0, 1): 2 * KEY_CHUNK, (3, 4): KEY_CHUNK, (2,): 0}


def test_a_prefix_group_shares_only_keys_that_all_of_it_have() -> None:
    table = np.zeros((2, 64), dtype=np.int64)
    assert [
        group.prefix_length for group in groups_of([(KEY_CHUNK - 1, KEY_CHUNK), (KEY_CHUNK - 1, KEY_CHUNK)], table)
    ] == [0]
    assert [
        group.prefix_length for group in groups_of([(KEY_CHUNK, KEY_CHUNK + 1), (KEY_CHUNK, KEY_CHUNK + 1)], table)
    ] == [KEY_CHUNK]


def test_smaller_prefix_groups_are_padded_and_marked() -> None:
    table = np.arange(5 * 64).reshape(5, 64)
    table[:2, :8] = table[0, :8]
    table[2:, :8] = table[2, :8]
    (group,) = groups_of([(200, 201)] * 5, table)
    assert (group.prefix_groups, group.real.tolist()) == (2, [True, True, False, True, True, True])
    assert group.chunks.slot.tolist() == [0, 1, 1, 2, 3, 4]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(1, 300))), min_size=1, max_size=30),
    st.integers(1, 4),
)
def test_every_token_attends_once_in_a_group_of_bounded_size(runs: list[tuple[int, int]], kinds: int) -> None:
    spans = [(start, start + count) for start, count in runs]
    table = np.stack([np.arange(64) + 64 * (slot % kinds) for slot in range(len(spans))])
    for slot, (_, stop) in enumerate(spans):  # the last block of each is not shared
        table[slot, (stop - 1) // SIZE :] = 10000 + 64 * slot
    groups = groups_of(spans, table, block_bytes=1 << 18)
    expected = []
    row = 0
    for slot, (start, stop) in enumerate(spans):
        expected += [(row + position - start, position, slot) for position in range(start, stop)]
        row += stop - start
    assert tokens_of(groups) == sorted(expected)
    for group in groups:
        members = len(group.chunks)
        own = -(-(int(group.chunks.end.max()) - group.prefix_length) // SIZE) * SIZE
        scores = members * int(group.chunks.count.max()) * (group.prefix_length + own) * 4
        fetched = (group.prefix_groups * group.prefix_length + members * own) // SIZE * (1 << 18)
        assert (
            group.prefix_groups == 1
            or members == group.prefix_groups == 1
            or (scores <= CPU_LIMITS.scores * 2 and fetched <= CPU_LIMITS.fetch_bytes * 2)
        )
        for family in range(group.prefix_groups):
            group_size = members // group.prefix_groups
            slots = group.chunks.slot[family * group_size : (family + 1) * group_size]
            held = table[slots, : group.prefix_length // SIZE]
            assert np.all(held == held[:1])
            assert np.all(group.chunks.end > group.prefix_length)
