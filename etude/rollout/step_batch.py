"""The memory of an embedded engine, and one pass over the work of a step.

Layers with heads of one shape share a `KVCache`. All caches have the same blocks, so one block table serves them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.models import Model
from etude.rollout.batch_invariance import ProductShapes
from etude.rollout.kv_cache import ForwardBatch, KVCache
from etude.rollout.scheduler import ScheduledWork


class EngineCaches:
    """All that an engine keeps of its requests' tokens."""

    def __init__(self, model: Model, *, blocks: int, size: int) -> None:
        shapes = dict.fromkeys(shape for shape in model.attention_shapes if shape is not None)
        self.kv = [KVCache(model, shape, blocks=blocks, size=size) for shape in shapes]


class StepBatch:
    """One forward pass over the work of a step: an `AttentionFn` that asks the batch of each layer's cache."""

    def __init__(
        self,
        caches: EngineCaches,
        works: Sequence[ScheduledWork],
        table: NDArray[np.int64],
        shapes: ProductShapes,
        batch_class: type[ForwardBatch] = ForwardBatch,
    ) -> None:
        """table: the blocks of each slot. batch_class: the class that attends over the blocks of one cache."""
        batches = [batch_class(cache, works, table, shapes) for cache in caches.kv]
        self.ids, self.positions = batches[0].ids, batches[0].positions
        self.sampled, self.last_rows = batches[0].sampled, batches[0].last_rows
        self._of_layer = {layer: batch for batch in batches for layer in batch.cache.row_of_layer}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionFn`."""
        attend = self._of_layer[layer]
        return attend(layer, q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
