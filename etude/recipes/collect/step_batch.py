"""Builds the batch of a step from rollouts whose tokens may be in an object store: each rank builds its share there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from etude.batch import Batch, BatchMeta, BatchSchema
from etude.data.collate import collate
from etude.protocols import Crew
from etude.recipes.collect.rollouts import ScoredRollout
from etude.records import Rollout, Sample


def build_step_batch(crew: Crew, scored: Sequence[ScoredRollout], version: int) -> Batch:
    """Return the batch of these rollouts. version: the trainer's policy version."""
    rollouts = [each.rollout for each in scored]
    models = [model for each in scored for model in each.models]
    schema = BatchSchema.from_records(
        models, [has_anchor for each in scored for has_anchor in each.has_anchor], rollouts
    )
    meta = BatchMeta.from_lengths(
        np.array([each.tokens for each in scored], np.int64),
        np.array([each.first_action for each in scored], np.int64),
        torch.from_numpy(np.unique([rollout.group for rollout in rollouts], return_inverse=True)[1].astype(np.int64)),
    )
    return crew.build_batch(meta, [each.samples_ref for each in scored], partial(_batch, schema, version), rollouts)


def _batch(
    schema: BatchSchema, version: int, samples: Sequence[Sequence[Sample]], rollouts: Sequence[Rollout]
) -> Batch:
    """Build the batch of some of the rollouts, or of none."""
    batch = collate([sample for row in samples for sample in row], rollouts, schema)
    return batch.replace(trainer_version=batch.group.new_full((batch.num_rollouts,), version))
