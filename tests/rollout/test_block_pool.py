"""The bookkeeping of blocks, compared with a plain restatement under random use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.rollout.block_pool import ROOT, BlockPool


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def held_and_learned(blocks: BlockPool, tokens: np.ndarray) -> list[int]:
    """Take the blocks of a context and register the full ones, as a scheduler does."""
    known, node = blocks.match_prefix(tokens, len(tokens) // blocks.size)
    own = [blocks.allocate() for _ in range(-(-len(tokens) // blocks.size) - len(known))]
    for place in range(len(known), len(tokens) // blocks.size):
        piece = tokens[place * blocks.size : (place + 1) * blocks.size]
        node = blocks.register(own[place - len(known)], node, piece)
    return known + own


def test_contexts_with_a_common_prefix_share_blocks() -> None:
    blocks = BlockPool(8, 2)
    one = held_and_learned(blocks, ids(1, 2, 3, 4, 5))
    two = held_and_learned(blocks, ids(1, 2, 3, 4, 6))
    assert one[:2] == two[:2] and one[2] != two[2]
    assert blocks.in_use == 4


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    blocks = BlockPool(8, 2)
    one = held_and_learned(blocks, ids(1, 2, 3, 4))
    two = held_and_learned(blocks, ids(9, 9, 3, 4))
    assert not set(one) & set(two)


def test_released_blocks_stay_known_until_their_memory_is_needed() -> None:
    blocks = BlockPool(4, 2)
    one = held_and_learned(blocks, ids(1, 2, 3, 4))
    blocks.release(one)
    assert blocks.available == 4
    assert blocks.match_prefix(ids(1, 2, 3, 4), 2)[0] == one
    blocks.release(one)
    for _ in range(3):  # two free ones, then the end of the known context goes before its start
        blocks.allocate()
    assert blocks.match_prefix(ids(1, 2, 3, 4), 2)[0] == one[:1]


def test_after_forgetting_nothing_matches_and_every_block_can_be_taken() -> None:
    blocks = BlockPool(4, 2)
    running = held_and_learned(blocks, ids(1, 2))
    blocks.release(held_and_learned(blocks, ids(3, 4, 5, 6)))
    blocks.reset_prefix_cache()
    assert blocks.match_prefix(ids(1, 2), 1) == ([], ROOT)
    assert blocks.match_prefix(ids(3, 4), 1) == ([], ROOT)
    blocks.release(running)
    assert sorted(blocks.allocate() for _ in range(4)) == [0, 1, 2, 3]


def test_a_block_released_too_often_fails_an_assertion() -> None:
    blocks = BlockPool(2, 2)
    block = blocks.allocate()
    blocks.release([block])
    with pytest.raises(AssertionError, match="more often than held"):
        blocks.release([block])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_matches_hold_their_tokens_and_no_block_is_lost(data: st.DataObject) -> None:
    """The contents of blocks are kept beside them; a match must find exactly the content asked for."""
    blocks = BlockPool(6, 2)
    content: dict[int, tuple[int, ...]] = {}
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["begin", "end", "forget"]))
        if action == "begin":
            tokens = ids(*data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)))
            known, node = blocks.match_prefix(tokens, len(tokens) // 2)
            for place, block in enumerate(known):
                assert content[block] == tuple(tokens[: 2 * place + 2])
            if blocks.available < -(-len(tokens) // 2) - len(known):
                blocks.release(known)
                continue
            for place in range(len(known), -(-len(tokens) // 2)):
                known.append(blocks.allocate())
                content[known[-1]] = tuple(tokens[: 2 * place + 2])
                if 2 * place + 2 <= len(tokens):
                    node = blocks.register(known[-1], node, tokens[2 * place : 2 * place + 2])
            held.append(known)
        elif action == "end" and held:
            blocks.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif action == "forget":
            blocks.reset_prefix_cache()
        assert blocks.in_use == len({block for one in held for block in one})
