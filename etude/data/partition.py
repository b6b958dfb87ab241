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
    outline = batch if isinstance(batch, BatchMeta) else BatchMeta.from_batch(batch)
    whole = np.arange(outline.num_rollouts) if by == "rollout" else outline.group.numpy()
    tokens = _token_costs(outline, ranks if by == "rollout" else 1)
    parts = balance(np.bincount(whole, weights=tokens).astype(np.float64), ranks)
    return [np.flatnonzero(np.isin(whole, part)).tolist() for part in parts]


def _token_costs(outline: BatchMeta, ranks: int) -> NDArray[np.float64]:
    """[U]: the tokens that are computed for each rollout: those after its prompt, and its part of the prompt, which
    each of so many ranks computes once. Rollouts of a group have one prompt, if theirs are of one length."""
    prompt = outline.prompt_lengths.numpy()
    alike = outline.group.numpy() * (prompt.max(initial=0) + 1) + prompt
    _, which, counts = np.unique(alike, return_inverse=True, return_counts=True)
    sharing = counts[which]
    own = outline.rollout_lengths.numpy() - prompt + 1.0  # so that those without a token are spread too
    found: NDArray[np.float64] = own + prompt * np.minimum(sharing, ranks) / sharing
    return found
