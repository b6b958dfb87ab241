"""Builds the batch of a step from rollouts whose tokens may be in an object store: each rank builds its share there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from etude.batch import Batch, BatchMeta, BatchSchema
from etude.data.collate import collate
from etude.protocols import Crew
from etude.recipes.collect.rollout_rows import RolloutRows
from etude.records import Rollout, Sample

__all__ = ["build_step_batch"]


def build_step_batch(crew: Crew, rows: Sequence[RolloutRows], rollouts: Sequence[Rollout], version: int) -> Batch:
    """Return the batch of these rollouts, with the rows of each. version: the trainer's policy version."""
    models = [model for rollout_rows in rows for model in rollout_rows.models]
    schema = BatchSchema.from_records(
        models, [has_anchor for rollout_rows in rows for has_anchor in rollout_rows.has_anchor], rollouts
    )
    meta = BatchMeta.from_lengths(
        np.array([rollout_rows.tokens for rollout_rows in rows], np.int64),
        np.array([rollout_rows.first_action for rollout_rows in rows], np.int64),
        torch.from_numpy(np.unique([rollout.group for rollout in rollouts], return_inverse=True)[1].astype(np.int64)),
    )
    return crew.build_batch(
        meta, [rollout_rows.samples_ref for rollout_rows in rows], partial(_batch, schema, version), rollouts
    )


def _batch(
    schema: BatchSchema, version: int, samples: Sequence[Sequence[Sample]], rollouts: Sequence[Rollout]
) -> Batch:
    """Build the batch of some of the rollouts, or of none."""
    batch = collate([sample for row in samples for sample in row], rollouts, schema)
    return batch.replace(trainer_version=batch.group.new_full((batch.num_rollouts,), version))
