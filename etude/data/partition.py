"""Which ranks train on which rollouts: whole groups or rollouts, with about as many tokens to compute for each.

What is computed of a group is its prompt, once, and what comes after it in each rollout: see `pack`. So a group of long
answers to a short prompt costs far more than one of short answers to a long prompt that has as many tokens.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from etude.batch import Batch, BatchMeta
from etude.data.balance import balance

__all__ = ["partition_rollouts"]


def partition_rollouts(
    batch: Batch | BatchMeta, ranks: int, by: Literal["rollout", "group"] = "group"
) -> list[list[int]]:
    """The places of each rank's rollouts, in order. Where there are fewer groups than ranks, some get none."""
    meta = batch if isinstance(batch, BatchMeta) else BatchMeta.from_batch(batch)
    units = np.arange(meta.num_rollouts) if by == "rollout" else meta.group.numpy()
    tokens = _token_costs(meta, ranks if by == "rollout" else 1)
    parts = balance(np.bincount(units, weights=tokens).astype(np.float64), ranks)
    return [np.flatnonzero(np.isin(units, part)).tolist() for part in parts]


def _token_costs(meta: BatchMeta, ranks: int) -> NDArray[np.float64]:
    """[U]: the tokens that are computed for each rollout: those after its prompt, and its part of the prompt, which
    each of so many ranks computes once. Rollouts of a group have one prompt, if theirs are of one length."""
    prompt = meta.prompt_lengths.numpy()
    prompt_keys = meta.group.numpy() * (prompt.max(initial=0) + 1) + prompt
    _, key_indices, counts = np.unique(prompt_keys, return_inverse=True, return_counts=True)
    num_sharing = counts[key_indices]
    completion_costs = meta.rollout_lengths.numpy() - prompt + 1.0  # so that those without a token are spread too
    costs: NDArray[np.float64] = completion_costs + prompt * np.minimum(num_sharing, ranks) / num_sharing
    return costs
