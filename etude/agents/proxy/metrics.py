"""Counts and times of an endpoint."""

from __future__ import annotations

from collections import Counter, deque

MAX_CALLS = 4096
"""The number of recent calls whose times are kept."""
PERCENTILES = (50, 90, 99)


class EndpointMetrics:
    """Counts since the start, and the times of recent calls."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._seconds: deque[float] = deque(maxlen=MAX_CALLS)
        self._overheads: deque[float] = deque(maxlen=MAX_CALLS)
        self._external_seconds: deque[float] = deque(maxlen=MAX_CALLS)

    def record_call(self, seconds: float, sampling: float | None = None) -> None:
        """Add an answered call. sampling: the seconds of waiting for a slot and of sampling, if they are known
        separately."""
        self._seconds.append(seconds)
        if sampling is not None:
            self._overheads.append(seconds - sampling)

    def record_external_call(self, seconds: float) -> None:
        """Add a call that an external model answered."""
        self._external_seconds.append(seconds)

    def summary(self) -> dict[str, float]:
        """Return all metrics by name."""
        metrics = {f"endpoint/{name}": float(count) for name, count in self.counts.items()}
        series = {"latency": self._seconds, "overhead": self._overheads, "external_latency": self._external_seconds}
        for name, times in series.items():
            ordered = sorted(times)
            for percent in PERCENTILES if ordered else ():
                metrics[f"endpoint/{name}_p{percent}"] = ordered[(len(ordered) - 1) * percent // 100]
        return metrics
