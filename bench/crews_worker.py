"""The worker of `bench.crews`, in a module of its own: ranks import it by its name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etude.batch import Batch
from etude.observe import Last, Metrics
from etude.protocols import Gather, Split, spread

__all__ = ["Idle"]


class Idle:
    """A worker with nothing to do."""

    @spread(Split.GROUPS, Gather.CONCAT)
    def annotate(self, batch: Batch) -> Batch:
        """One column more."""
        return batch.replace(old_logp=torch.zeros(batch.tokens))

    @spread(Split.GROUPS, Gather.CONCAT)
    def estimate(self, batch: Batch) -> Batch:
        """And another."""
        return batch.replace(advantage=torch.zeros(batch.tokens))

    @spread(Split.GROUPS, Gather.METRICS)
    def update(self, parts: Sequence[Batch]) -> Metrics:
        """Look at what came."""
        return Metrics({"tokens": Last.of(sum(part.tokens for part in parts))})

    @spread()
    def publish(self, version: int) -> Metrics:
        """Nothing."""
        return Metrics({"version": Last.of(version)})

    @spread(gather=Gather.METRICS)
    def measure(self) -> Metrics:
        """Nothing either."""
        return Metrics()
