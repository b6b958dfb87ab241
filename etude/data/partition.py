"""The partition of rollouts over ranks: whole groups or rollouts, with about the same number of computed tokens.

A group computes its prompt once, and the tokens after it for each rollout (`pack`). So a group of long answers to a
short prompt costs far more than a group of short answers to a long prompt with as many tokens.

Balanced parts let no rank wait long for another. `balance` differences costs as Karmarkar and Karp do. Each item begins
as one division: its cost in one part, and nothing in the others. The two divisions with the largest differences are
joined: the fullest parts of one with the emptiest of the other. This repeats until one division is left. The error of
the greedy rule is about the smallest cost; here it is far smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from etude.batch import Batch, BatchMeta

_Part = tuple[float, list[int]]
"""A part's cost and its items."""


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


def balance(costs: Sequence[float] | NDArray[np.float64], parts: int) -> list[list[int]]:
    """Divide the items 0 … n-1 into `parts` lists of about the same cost, each in order.

    Equal costs always give equal lists. With fewer items than parts, some lists are empty.
    """
    values = np.asarray(costs, dtype=np.float64)
    # The division with the largest difference first; among equals the one with the earliest item.
    empty: list[_Part] = [(0.0, [])] * (parts - 1)
    heap = [(-cost, item, [(cost, [item]), *empty]) for item, cost in enumerate(values.tolist())]
    heapify(heap)
    while len(heap) > 1:
        _, item, first = heappop(heap)
        _, other, second = heappop(heap)
        joined = sorted(
            (
                (a + b, first_items + second_items)
                for (a, first_items), (b, second_items) in zip(first, reversed(second), strict=True)
            ),
            key=lambda part: -part[0],
        )
        heappush(heap, (joined[-1][0] - joined[0][0], min(item, other), joined))
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]
