"""The metrics of each data source of a mix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from etude.observe import Last, Mean, Metrics
from etude.recipes.collect.rollouts import ScoredRollout


class SourceMetrics:
    """Measures the rollouts of each data source, from the step on that has seen a second one."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def measure(self, scored: Sequence[ScoredRollout]) -> Metrics:
        """Return the metrics of a step's rollouts by their data sources; none for data of one source."""
        by_source: dict[str, list[ScoredRollout]] = defaultdict(list)
        for each in scored:
            by_source[each.rollout.source].append(each)
        self._seen |= by_source.keys()
        metrics = Metrics()
        if len(self._seen) < 2:
            return metrics
        for source, chosen in by_source.items():
            name = f"source/{source or 'none'}"
            count = len(chosen)
            metrics.add(f"{name}/reward", Mean.over(sum(each.trained_reward for each in chosen), count))
            metrics.add(f"{name}/answer_length", Mean.over(sum(each.answer_tokens for each in chosen), count))
            metrics.add(f"{name}/turns", Mean.over(sum(each.turns for each in chosen), count))
            metrics.add(f"{name}/truncated", Mean.over(sum(each.rollout.truncated for each in chosen), count))
            metrics.add(f"{name}/rollouts", Last.of(count))
        return metrics
