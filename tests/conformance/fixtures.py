"""The off-policy batches that formulas are compared on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from etude.batch import Batch
from tests.batches import random_batch


def awkward(seed: int, groups: Sequence[int] = (3, 1, 4), *, longest: int = 9, drift: float = 0.3) -> Batch:
    """A random batch of several rows and turns a rollout, NaN in the context, in which rollout 1 chose no token.

    What rollout 1 had to say is left in its columns, as noise: nothing there may be looked at. Its reward stays.
    """
    return _awkward(seed, tuple(groups), longest, drift)


@cache  # most formulas are compared on the same batch, which no test changes
def _awkward(seed: int, groups: tuple[int, ...], longest: int, drift: float) -> Batch:
    batch = random_batch(seed, groups, longest=longest, drift=drift)
    silent = torch.zeros(batch.num_tokens, dtype=torch.bool)
    silent[int(batch.rollout_token_offsets[1]) : int(batch.rollout_token_offsets[2])] = True
    return batch.replace(
        action=batch.action & ~silent, token_reward=batch.require("token_reward").masked_fill(silent, torch.nan)
    )
