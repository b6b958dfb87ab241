"""The worker of `bench.crews`, in its own module, because ranks import it by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from etude.batch import Batch
from etude.images import PromptImages
from etude.observe import Last, Metrics
from etude.protocols import Gather, Ids, Split, dispatch_mode
from etude.records import Completion, SamplingParams

__all__ = ["Idle"]


class Idle:
    """A worker that computes nothing."""

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def annotate(self, batch: Batch) -> Batch:
        """Return the batch with one more column."""
        return batch.replace(old_logp=torch.zeros(batch.num_tokens))

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def estimate(self, batch: Batch) -> Batch:
        """Return the batch with another column."""
        return batch.replace(advantage=torch.zeros(batch.num_tokens))

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def update(self, parts: Sequence[Batch]) -> Metrics:
        """Read the batch."""
        return Metrics({"tokens": Last.of(sum(part.num_tokens for part in parts))})

    @dispatch_mode()
    def publish(self, version: int) -> Metrics:
        """Do nothing."""
        return Metrics({"version": Last.of(version)})

    @dispatch_mode(gather=Gather.METRICS)
    def measure(self) -> Metrics:
        """Do nothing."""
        return Metrics()

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        images: PromptImages | None = None,
        *,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Return an answer of the requested length, at once."""
        del prompt, images
        if on_start is not None:
            on_start()
        nothing = np.zeros(sampling.max_tokens, np.int32)
        logp = nothing.astype(np.float32)
        return Completion(nothing, logp, nothing, "length", raw_logp=logp)
