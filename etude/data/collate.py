"""The collation of samples and their rollouts to one batch for a trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etude.batch import Batch, BatchSchema
from etude.records import Rollout, Sample


def collate(samples: Sequence[Sample], rollouts: Sequence[Rollout], schema: BatchSchema | None = None) -> Batch:
    """Return the batch of these rollouts, in order, also of those without a row. schema: see `Batch.from_records`.

    Besides the records' columns it has the column `metric`: a rollout's whole reward, with the rewards of its turns.
    Penalties and KL terms change the reward later, but not this column.
    """
    batch = Batch.from_records(samples, rollouts, schema)
    assert batch.reward is not None
    metric = batch.reward.clone()
    if batch.token_reward is not None:
        tokens = batch.rollout_token_offsets[1:] - batch.rollout_token_offsets[:-1]
        rollout = torch.repeat_interleave(torch.arange(batch.num_rollouts), tokens)
        metric.index_add_(0, rollout, batch.token_reward)
    return batch.replace(metric=metric)
