"""The partition of rollouts over ranks: whole groups or rollouts, with about the same number of computed tokens.

A group computes its prompt once, and the tokens after it for each rollout (`pack`). So a group of long answers to a
short prompt costs far more than a group of short answers to a long prompt with as many tokens.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from etude.batch import Batch, BatchMeta
from etude.data.balance import balance


def partition_rollouts(
    batch: Batch | BatchMeta, ranks: int, by: Literal["rollout", "group"] = "group"
) -> list[list[int]]:
    """Return the indices of each rank's rollouts, in order. With fewer groups than ranks, some ranks get none."""
    meta = batch if isinstance(batch, BatchMeta) else BatchMeta.from_batch(batch)
    units = np.arange(meta.num_rollouts) if by == "rollout" else meta.group.numpy()
    tokens = _token_costs(meta, ranks if by == "rollout" else 1)
    parts = balance(np.bincount(units, weights=tokens).astype(np.float64), ranks)
    return [np.flatnonzero(np.isin(units, part)).tolist() for part in parts]


def _token_costs(meta: BatchMeta, ranks: int) -> NDArray[np.float64]:
    """Return the computed tokens of each rollout, [U]: those after its prompt, and its share of the prompt.

    Each of `ranks` ranks computes a prompt once. Prompts of a group with the same length count as one prompt.
    """
    prompt = meta.prompt_lengths.numpy()
    prompt_keys = meta.group.numpy() * (prompt.max(initial=0) + 1) + prompt
    _, key_indices, counts = np.unique(prompt_keys, return_inverse=True, return_counts=True)
    num_sharing = counts[key_indices]
    completion_costs = meta.rollout_lengths.numpy() - prompt + 1.0  # + 1 spreads rollouts without a token too
    costs: NDArray[np.float64] = completion_costs + prompt * np.minimum(num_sharing, ranks) / num_sharing
    return costs
