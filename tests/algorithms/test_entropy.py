"""The top-entropy mask: its threshold, its ties, and ranks that have only their part."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.algorithms.entropy import EntropyConfig, top_entropy_mask
from etude.algorithms.view import View
from tests.algorithms.flat import flat_view, float64
from tests.batches import random_batch
from tests.thread_ranks import on_ranks


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
def test_the_tokens_with_the_largest_entropies_are_kept(share: float) -> None:
    view = View(random_batch(3, (4, 4)))
    entropy = view.column("entropy").numpy()
    keep = top_entropy_mask(view, share).numpy()
    count = max(1, round(share * len(entropy)))
    assert keep.sum() == count
    assert set(entropy[keep]) == set(np.sort(entropy)[-count:])


def test_all_tokens_that_tie_with_the_last_one_are_kept() -> None:
    view = flat_view([3, 2], entropy=float64([1, 2, 0, 1, 1]))
    assert top_entropy_mask(view, 0.4).tolist() == [True, True, False, True, True]
    assert top_entropy_mask(view, 0.2).tolist() == [False, True, False, False, False]
    assert top_entropy_mask(flat_view([4], entropy=float64([0, 0, 0, 0])), 0.2).all()


def test_the_share_is_rounded_to_whole_tokens_and_is_at_least_one() -> None:
    view = flat_view([5], entropy=float64([5, 4, 3, 2, 1]))
    assert [int(top_entropy_mask(view, share).sum()) for share in (0.01, 0.29, 0.31, 0.6)] == [1, 1, 2, 3]


def test_without_actions_no_token_is_kept() -> None:
    assert top_entropy_mask(flat_view([0, 0], entropy=float64([])), 0.5).shape == (0,)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_ranks_keep_the_tokens_that_one_rank_keeps(share: float) -> None:
    batch = random_batch(5, (3, 2, 4))
    one_rank = top_entropy_mask(View(batch), share)
    parts = [batch.select([0, 1, 2]), batch.select([3, 4]), batch.select([5, 6, 7, 8])]
    results = on_ranks(3, lambda rank, ranks: top_entropy_mask(View(parts[rank], ranks=ranks), share))
    assert torch.equal(torch.cat(results), one_rank)


def test_the_entropy_options_declare_columns_and_outputs() -> None:
    assert (EntropyConfig().required_columns(), EntropyConfig().forward_outputs()) == (frozenset(), frozenset())
    assert EntropyConfig(top_share=0.2).required_columns() == {"entropy"}
    assert EntropyConfig(coefficient=0.01).forward_outputs() == {"entropy"}
