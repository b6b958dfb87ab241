"""Counts and times of an endpoint."""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal

MAX_CALLS = 4096
"""The number of recent calls whose times are kept."""
PERCENTILES = (50, 90, 99)


class EndpointMetrics:
    """Counts since the start, and the times of recent calls."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._seconds: dict[str, deque[float]] = {
            name: deque(maxlen=MAX_CALLS) for name in ("latency", "overhead", "external_latency")
        }

    def record(self, name: Literal["latency", "overhead", "external_latency"], seconds: float) -> None:
        """Add a duration of one call.

        latency: from the call to its answer. overhead: the latency without sampling and the wait for a slot.
        external_latency: the latency of a call to an external model.
        """
        self._seconds[name].append(seconds)

    def summary(self) -> dict[str, float]:
        """Return all metrics by name."""
        metrics = {f"endpoint/{name}": float(count) for name, count in self.counts.items()}
        for name, times in self._seconds.items():
            ordered = sorted(times)
            for percent in PERCENTILES if ordered else ():
                metrics[f"endpoint/{name}_p{percent}"] = ordered[(len(ordered) - 1) * percent // 100]
        return metrics
