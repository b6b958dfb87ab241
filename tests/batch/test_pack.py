"""A pack shows a forward pass each token once, and maps what it computed back to the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from etude.batch import Batch, Pack
from etude.errors import BatchError
from tests.batches import batches
from tests.packs import separate_rows, unpack


@given(batches)
def test_one_segment_a_row_predicts_each_token_from_the_one_before(batch: Batch) -> None:
    pack = separate_rows(batch)
    unpacked = unpack(pack, torch.arange(batch.num_tokens).double())
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    starts = batch.offsets[:-1][batch.offsets[1:] > batch.offsets[:-1]]
    first[starts] = True
    assert torch.equal(unpacked.isnan(), first)
    assert torch.equal(unpacked[~first], torch.arange(batch.num_tokens).double()[~first] - 1)


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
