"""The off-policy batches on which formulas are compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from etude.batch import Batch
from tests.batches import random_batch


def irregular_batch(seed: int, groups: Sequence[int] = (3, 1, 4), *, longest: int = 9, drift: float = 0.3) -> Batch:
    """Return a random batch with several rows and turns per rollout, and NaN in the context.

    Rollout 1 has no action token. Its reward stays, and its columns keep noise that no algorithm may read.
    """
    return _irregular_batch(seed, tuple(groups), longest, drift)


@cache  # most formulas are compared on the same batch, which no test changes
def _irregular_batch(seed: int, groups: tuple[int, ...], longest: int, drift: float) -> Batch:
    batch = random_batch(seed, groups, longest=longest, drift=drift)
    without_action = torch.zeros(batch.num_tokens, dtype=torch.bool)
    without_action[int(batch.rollout_token_offsets[1]) : int(batch.rollout_token_offsets[2])] = True
    return batch.replace(
        action=batch.action & ~without_action,
        token_reward=batch.require("token_reward").masked_fill(without_action, torch.nan),
    )
