"""Samples and the rollouts they are rows of, as one batch for a trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etude.batch import Batch, BatchSchema
from etude.records import Rollout, Sample

__all__ = ["collate"]


def collate(samples: Sequence[Sample], rollouts: Sequence[Rollout], schema: BatchSchema | None = None) -> Batch:
    """The batch of these rollouts, in their order, those without a row included. form: see `Batch.from_records`.

    Beside what the records hold it has the column `metric`: all that a rollout was given, what its turns were paid
    included, which stays as it is when a penalty or a KL term is added to the reward.
    """
    batch = Batch.from_records(samples, rollouts, schema)
    assert batch.reward is not None
    metric = batch.reward.clone()
    if batch.token_reward is not None:
        tokens = batch.rollout_token_offsets[1:] - batch.rollout_token_offsets[:-1]
        rollout = torch.repeat_interleave(torch.arange(batch.num_rollouts), tokens)
        metric.index_add_(0, rollout, batch.token_reward)
    return batch.replace(metric=metric)
