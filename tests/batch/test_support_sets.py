"""A batch's column of token sets says of each token what its record said, wherever the token goes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from etude.batch import Batch, from_bytes, to_bytes
from etude.errors import BatchError
from etude.records import Rollout, Sample
from etude.support import Support, encode_ids, encode_set
from tests.batch.test_from_records import sample as bare

VOCAB = 70
"""Ids of the vocabulary: the third word of a set as bits is not full."""


def sets_of(seed: int, tokens: int) -> list[np.ndarray]:
    """Return a mask for each token: a few ids, all but a few, half of them, or all; some of them twice."""
    numbers = np.random.default_rng(seed)
    shares = [0.03, 0.97, 0.5, 1.0]
    masks = [numbers.random(VOCAB) < shares[place % 4] for place in range(tokens)]
    for place in range(4, tokens, 3):
        masks[place] = masks[place - 4]
    return masks


def sample(rollout: int, tokens: int) -> tuple[Sample, list[np.ndarray]]:
    masks = sets_of(rollout, tokens)
    support = Support.build([encode_set(mask) for mask in masks])
    return replace(bare(rollout, "A" * tokens), support=support), masks


def read(batch: Batch) -> torch.Tensor:
    assert batch.support is not None and batch.support_sets is not None
    return batch.support_sets.mask(batch.support, VOCAB)


def test_tokens_keep_their_sets_through_selections_joins_and_bytes() -> None:
    one, masks = sample(0, 9)
    other, more = sample(1, 6)
    without = bare(2, "AAAA")
    batch = Batch.from_records([one, other, without], [Rollout(id, 0, id, 0.0) for id in range(3)])
    whole = [np.ones(VOCAB, np.bool_)] * 4
    expected = torch.from_numpy(np.array([*masks, *more, *whole]))
    torch.testing.assert_close(read(batch), expected)

    backwards = batch.select([2, 1])
    torch.testing.assert_close(read(backwards), torch.cat([expected[15:], expected[9:15]]))
    assert backwards.support_sets is not None and batch.support_sets is not None
    assert len(backwards.support_sets.kind) < len(batch.support_sets.kind), "only the sets in use come along"
    assert backwards.select([]).support_sets is not None

    alone = Batch.from_records([without], [Rollout(2, 0, 2, 0.0)])
    assert alone.support is None
    joined = Batch.concat([alone, batch.select([1]), batch.select([0]), alone])
    torch.testing.assert_close(read(joined), torch.cat([expected[15:], expected[9:15], expected[:9], expected[15:]]))
    torch.testing.assert_close(read(from_bytes(to_bytes(joined))), read(joined))
    torch.testing.assert_close(read(joined.to("cpu")), read(joined))


def test_a_column_of_sets_without_its_table_is_refused() -> None:
    batch = Batch.from_records([bare(0, "AAA")], [Rollout(0, 0, 0, 0.0)])
    with pytest.raises(BatchError, match="together"):
        batch.replace(ids=batch.ids, support=torch.zeros(3, dtype=torch.int32))


def test_sets_of_another_vocabulary_are_refused() -> None:
    one = replace(bare(0, "AA"), support=Support.build([encode_set(np.arange(VOCAB) % 2 == 0), encode_ids([3], VOCAB)]))
    batch = Batch.from_records([one], [Rollout(0, 0, 0, 0.0)])
    assert batch.support is not None and batch.support_sets is not None
    with pytest.raises(BatchError, match="another vocabulary"):
        batch.support_sets.mask(batch.support, 200)
