"""Which ranks train on which rollouts: whole groups or rollouts, with about as many tokens for each."""

from __future__ import annotations

from typing import Literal

import numpy as np

from etude.batch import Batch, Outline
from etude.data.balance import balance

__all__ = ["shares"]


def shares(batch: Batch | Outline, ranks: int, by: Literal["rollout", "group"] = "group") -> list[list[int]]:
    """The places of each rank's rollouts, in order. Where there are fewer groups than ranks, some get none."""
    tokens = np.diff(batch.unit_tokens.cpu().numpy()) + 1.0  # so that those without a token are spread too
    whole = np.arange(batch.rollouts) if by == "rollout" else batch.group.cpu().numpy()
    parts = balance(np.bincount(whole, weights=tokens).astype(np.float64), ranks)
    return [np.flatnonzero(np.isin(whole, part)).tolist() for part in parts]
