"""Measures of how old a batch's rollouts are: the policy versions between sampler and trainer."""

from __future__ import annotations

from etude.algorithms.view import View
from etude.observe import Max, Mean, Metrics

MAX_SHARES = 16
"""The largest staleness with a separate share; older rollouts have one share for all."""


def measure_staleness(view: View) -> Metrics:
    """Measure the staleness of the rollouts that acted; return no metrics if the batch does not have the versions.

    Staleness is the trainer's version at the start of the step, minus the version of the rollout's oldest action token.
    `staleness/0`, `staleness/1` and so on are shares of rollouts, up to the largest staleness over all ranks.
    """
    batch = view.batch
    if batch.version is None or batch.trainer_version is None:
        return Metrics()
    acted = view.rollouts.lengths > 0
    oldest = view.rollouts.min(view.column("version").double())
    staleness = (batch.trainer_version - oldest)[acted]
    count, everywhere = len(staleness), view.ranks.all_gather(staleness)
    largest = int(everywhere.max()) if len(everywhere) else -1
    metrics = Metrics({"staleness/mean": Mean.over(staleness.sum(), count)})
    if count:
        metrics.add("staleness/max", Max.of(staleness.max()))
    for versions in range(min(largest, MAX_SHARES) + 1):
        metrics.add(f"staleness/{versions}", Mean.over((staleness == versions).count_nonzero(), count))
    if largest > MAX_SHARES:
        older = (staleness > MAX_SHARES).count_nonzero()
        metrics.add(f"staleness/over_{MAX_SHARES}", Mean.over(older, count))
    return metrics
