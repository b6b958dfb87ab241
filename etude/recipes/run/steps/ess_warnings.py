"""Warns of steps in which few rollouts decide the update."""

from __future__ import annotations

from collections.abc import Mapping

from etude.observe import Metric, get_logger
from etude.recipes.collect.statistics import also_before

ROLLOUT_ESS = "mismatch/rollout_effective_sample_size"
"""The metric that `ess_floor` bounds."""


class EssWarnings:
    """Warns of steps whose effective sample size is under a floor: at once, and again when they have doubled in a
    row."""

    def __init__(self, floor: float) -> None:
        """floor: a share of the rollouts; 0 never warns."""
        self._floor = floor
        self._steps = 0

    def check(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Check the metrics of a step's updates; a step that measured nothing counts as neither."""
        share = metrics[ROLLOUT_ESS].value() if ROLLOUT_ESS in metrics else None
        if share is None:
            return
        self._steps = self._steps + 1 if share < self._floor else 0
        if self._steps.bit_count() != 1:  # 1, 2, 4, 8 … steps in a row
            return
        get_logger("recipes").warning(
            "In step %d the effective sample size is %.2g of the rollouts, under `ess_floor=%g`%s: few rollouts decide "
            "the update, as before a collapse. The trainer's policy is far from the sampler's, by stale rollouts or by "
            "rounding. Bound the ratios with `correction.weight=truncate` or `loss=ipo`, or lower `max_staleness` or "
            "`train.learning_rate`.",
            step,
            share,
            self._floor,
            f",{also}" if (also := also_before(self._steps)) else "",
        )
