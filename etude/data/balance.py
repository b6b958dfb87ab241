"""The division of items into parts of about the same cost, by Karmarkar and Karp's differencing.

Balanced parts let no rank wait long for another. Each item begins as one division: its cost in one part, and nothing in
the others. The two divisions with the largest differences are joined: the fullest parts of one with the emptiest of the
other. This repeats until one division is left. The error of the greedy rule is about the smallest cost; here it is far
smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError

_Part = tuple[float, list[int]]
"""A part's cost and its items."""


def balance(costs: Sequence[float] | NDArray[np.float64], parts: int) -> list[list[int]]:
    """Divide the items 0 … n-1 into `parts` lists of about the same cost, each in order.

    Equal costs always give equal lists. With fewer items than parts, some lists are empty.
    """
    if parts < 1:
        raise ConfigError(f"Costs are divided into 1 or more parts; {parts} parts were given.")
    values = np.asarray(costs, dtype=np.float64)
    if not (np.isfinite(values) & (values >= 0)).all():
        invalid = int(np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0])
        raise ConfigError(f"A cost is a finite number from 0 on; item {invalid} costs {values[invalid]}.")
    # The division with the largest difference first; among equals the one with the earliest item.
    heap = [(-cost, item, _single_item(cost, item, parts)) for item, cost in enumerate(values.tolist())]
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


def _single_item(cost: float, item: int, parts: int) -> list[_Part]:
    """Return the division of one item, the fullest part first."""
    return [(cost, [item]), *((0.0, list[int]()) for _ in range(parts - 1))]
