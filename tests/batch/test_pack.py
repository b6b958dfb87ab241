"""A pack shows a forward pass each token once, and maps what it computed back to the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from etude.batch import Batch, Pack
from etude.errors import BatchError
from tests.batches import batches, random_batch


@given(batches)
def test_one_segment_a_row_predicts_each_token_from_the_one_before(batch: Batch) -> None:
    pack = Pack.from_batch(batch)
    unpacked = pack.unpack(torch.arange(batch.num_tokens).double())
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    starts = batch.offsets[:-1][batch.offsets[1:] > batch.offsets[:-1]]
    first[starts] = True
    assert torch.equal(unpacked.isnan(), first)
    assert torch.equal(unpacked[~first], torch.arange(batch.num_tokens).double()[~first] - 1)


def test_attention_stays_within_a_row() -> None:
    batch = random_batch(0, (2,))
    seen = Pack.from_batch(batch).attention_mask()
    row = torch.searchsorted(batch.offsets, torch.arange(batch.num_tokens), right=True)
    assert torch.equal(seen, (row[:, None] == row[None, :]).tril())


def shared_prompt() -> Pack:
    """Prompt p0 p1 continued by a0 a1 and by b0: the batch has rows [p0 p1 a0 a1] and [p0 p1 b0]."""
    return Pack(
        ids=torch.tensor([10, 11, 1, 2, 3], dtype=torch.int32),
        positions=torch.tensor([0, 1, 2, 3, 2]),
        offsets=torch.tensor([0, 2, 4, 5]),
        parent=torch.tensor([-1, 0, 0]),
        source=torch.tensor([-1, 0, 1, 2, -1, 0, 1]),
    )


def test_a_shared_prompt_predicts_both_of_its_continuations() -> None:
    hidden = torch.arange(10.0).reshape(5, 2)
    unpacked = shared_prompt().unpack(hidden)
    assert unpacked.shape == (7, 2)
    assert unpacked[:, 0].nan_to_num(-1).tolist() == [-1, 0, 2, 4, -1, 0, 2]


def test_a_segment_sees_its_ancestors_and_not_its_siblings() -> None:
    seen = shared_prompt().attention_mask().int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]


def test_gradients_of_both_continuations_meet_in_the_prompt() -> None:
    hidden = torch.ones(5, requires_grad=True)
    shared_prompt().unpack(hidden)[[2, 6]].sum().backward()
    assert hidden.grad is not None and hidden.grad.tolist() == [0, 2, 0, 0, 0]


def test_a_pack_that_is_not_a_tree_is_refused() -> None:
    with pytest.raises(BatchError, match="Segment 0 has parent 1"):
        Pack(
            ids=torch.zeros(2).int(),
            positions=torch.zeros(2).long(),
            offsets=torch.tensor([0, 1, 2]),
            parent=torch.tensor([1, -1]),
            source=torch.tensor([-1, -1]),
        )
    with pytest.raises(BatchError, match="Segment 1 has parent -2"):
        Pack(
            ids=torch.zeros(2).int(),
            positions=torch.zeros(2).long(),
            offsets=torch.tensor([0, 1, 2]),
            parent=torch.tensor([-1, -2]),
            source=torch.tensor([-1, -1]),
        )
    with pytest.raises(BatchError, match="end at token 3, but the pack has 2"):
        Pack(
            ids=torch.zeros(2).int(),
            positions=torch.zeros(2).long(),
            offsets=torch.tensor([0, 1, 3]),
            parent=torch.tensor([-1, -1]),
            source=torch.tensor([-1, -1]),
        )
