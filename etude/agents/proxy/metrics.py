"""Counts and times of an endpoint."""

from __future__ import annotations

from collections import Counter, deque

__all__ = ["EndpointMetrics"]

MAX_CALLS = 4096
"""Of how many calls the times are kept."""
PERCENTILES = (50, 90, 99)


class EndpointMetrics:
    """What an endpoint has done since it was made, and how long its last calls took."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._seconds: deque[float] = deque(maxlen=MAX_CALLS)
        self._overheads: deque[float] = deque(maxlen=MAX_CALLS)
        self._external_seconds: deque[float] = deque(maxlen=MAX_CALLS)

    def record_call(self, seconds: float, sampling: float | None = None) -> None:
        """A call was answered; so much of its time was spent in the queue and on sampling, where the two can be told
        apart from the rest."""
        self._seconds.append(seconds)
        if sampling is not None:
            self._overheads.append(seconds - sampling)

    def record_external_call(self, seconds: float) -> None:
        """A call was answered by a model of somebody else's."""
        self._external_seconds.append(seconds)

    def summary(self) -> dict[str, float]:
        """All of it, by name."""
        metrics = {f"endpoint/{name}": float(count) for name, count in self.counts.items()}
        series = {"latency": self._seconds, "overhead": self._overheads, "external_latency": self._external_seconds}
        for name, times in series.items():
            ordered = sorted(times)
            for percent in PERCENTILES if ordered else ():
                metrics[f"endpoint/{name}_p{percent}"] = ordered[(len(ordered) - 1) * percent // 100]
        return metrics
