"""Metrics of the sets of tokens that the sampler could draw from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from etude.batch import Batch


def measure_support(batch: Batch, vocab_size: int) -> Metrics:
    """Measure how far the sampler's filters and bans bound the tokens that are trained on.

    bound_share is the share of tokens with a set, and forced_share that of tokens whose set has no other token. size is
    the mean size of the sets, and bytes what a token's set takes in the batch.
    """
    if batch.support is None or batch.support_sets is None:
        return Metrics()
    tokens = int(batch.action.sum())
    index = batch.support[batch.action & (batch.support >= 0)].long()
    sizes = batch.support_sets.sizes(vocab_size)[index]
    numbers = tokens + len(batch.support_sets.data)
    return Metrics(
        {
            "support/bound_share": Mean.over(len(index), tokens),
            "support/forced_share": Mean.over(int((sizes == 1).sum()), tokens),
            "support/size": Mean.over(int(sizes.sum()), len(index)),
            "support/bytes": Mean.over(batch.support.itemsize * numbers, tokens),
        }
    )
