"""The memory of an embedded engine, and one pass over the work of a step.

The experts that a token went through are kept beside its keys and values, if a trainer replays them. So they are found
again wherever these are: in blocks that requests share, and after a preemption that left the blocks in place.

Layers with heads of one shape share a `KVCache`. All caches have the same blocks, so one block table serves them.
Recurrent layers have a state in each slot. A pass over them is a small forest: each request's tokens begin with the
state of a slot, and leave theirs in its own. Requests with the same context get the state of the one that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.models import Model
from etude.models.experts import pad_expert_rows
from etude.models.mixers import Mixer
from etude.models.routes import Routes, RouteShape, use_routes
from etude.models.states import Recurrence, Rows, SlotMemory, StateTree
from etude.models.vision import PassImages
from etude.rollout.batch_invariance import ProductShapes
from etude.rollout.block_pool import NO_SLOT
from etude.rollout.kv_cache import ForwardBatch, KVCache, count_slots
from etude.rollout.scheduler import ScheduledWork


class EngineCaches:
    """All that an engine keeps of its requests' tokens: keys and values in blocks, and states in slots."""

    def __init__(
        self, model: Model, *, blocks: int, size: int, max_num_seqs: int, routes: RouteShape | None = None
    ) -> None:
        """routes: the size of the choices of experts to keep; None keeps none."""
        self.route_shape = routes
        self.routes = None if routes is None else routes.blank(blocks * size, model.device)
        """[block · position, L · k]: the experts of each token whose keys and values are in the blocks."""
        shapes = dict.fromkeys(shape for shape in model.attention_shapes if shape is not None)
        self.kv = [KVCache(model, shape, blocks=blocks, size=size) for shape in shapes]
        self.has_states = model.state_bytes > 0
        self._slots = count_slots(max_num_seqs)
        self._states: dict[tuple[str, int], SlotMemory] = {}

    def states(self, operation: str, layer: int) -> SlotMemory:
        """Return the states of one operation of a layer."""
        return self._states.setdefault((operation, layer), SlotMemory(self._slots))

    def state_memory(self) -> list[Tensor]:
        """Return the memory of all states; a layer has it from its first step on."""
        return [memory.states for memory in self._states.values() if memory.states is not None]


class StepBatch(Mixer):
    """One forward pass over the work of a step: a `Mixer` that asks the batch of each layer's cache."""

    def __init__(
        self,
        caches: EngineCaches,
        works: Sequence[ScheduledWork],
        table: NDArray[np.int64],
        shapes: ProductShapes,
        batch_class: type[ForwardBatch] = ForwardBatch,
        images: PassImages | None = None,
    ) -> None:
        """table: the blocks of each slot. batch_class: the class that attends over the blocks of one cache.
        images: the features that tokens of the works take."""
        batches = [batch_class(cache, works, table, shapes) for cache in caches.kv]
        self.ids = batches[0].ids
        self.positions = _add_axes(works, batches[0].positions)
        self._images = images
        self.sampled = batches[0].sampled
        self.last_rows = batches[0].last_rows
        self._caches = caches
        self._row_multiple = shapes.rows.multiple
        self._computed = batches[0].computed
        self._of_layer = {layer: batch for batch in batches for layer in batch.cache.row_of_layer}
        if caches.has_states:
            self._tree = _state_tree(works, len(self.ids), self.ids.device)

    def compute_hidden(self, model: Model) -> Tensor:
        """[P, H]: run the model's layers on the tokens of the step and their padding."""
        shape = self._caches.route_shape
        routes = None if shape is None else Routes(shape)
        with pad_expert_rows(self._row_multiple), use_routes(routes):
            hidden = model.hidden(self.ids, self.positions, self, self._images)
        if routes is not None and self._caches.routes is not None:
            places = self._computed.places.to(self._caches.routes.device)
            self._caches.routes.index_copy_(0, places, self._computed.select(routes.recorded()))
        return hidden

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

    def convolve(self, layer: int, run: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
        """See `Mixer`."""
        return self._tree.convolve(run, x, width, self._caches.states("convolution", layer))

    def scan(self, layer: int, recurrence: Recurrence, inputs: Rows) -> Tensor:
        """See `Mixer`."""
        return self._tree.scan(recurrence, inputs, self._caches.states("recurrence", layer))


def _add_axes(works: Sequence[ScheduledWork], positions: Tensor) -> Tensor:
    """[P] → [P] or [3, P]: return the positions in three axes if a request of the pass has such."""
    requests = [work.request for work in works]
    if all(request.images is None or request.images.axes is None for request in requests):
        return positions
    axes = np.stack([positions.cpu().numpy()] * 3)
    first = 0
    for work, request in zip(works, requests, strict=True):
        stop = first + work.stop - work.start
        if request.images is not None:
            axes[:, first:stop] = request.images.positions(work.start, work.stop)
        first = stop
    return torch.from_numpy(axes).to(positions.device)


def _state_tree(works: Sequence[ScheduledWork], tokens: int, device: torch.device) -> StateTree:
    """Return the forest of a step. tokens: the number of the pass, with its padding."""
    slots = {id(work): [work.request.slot] for work in works if work.stop > work.start}
    for work in works:
        if work.duplicate_of is not None:
            slots[id(work.duplicate_of)].append(work.request.slot)
    segments = _Segments()
    for work in works:
        if work.stop == work.start:
            continue
        own, states = slots[id(work)], work.states
        if states.kept != NO_SLOT and states.border < work.stop:  # a state is kept in the middle
            segments.add(states.border - work.start, read=states.read, writes=[states.kept])
            segments.add(work.stop - states.border, writes=own, continues=True)
            continue
        kept = [] if states.kept == NO_SLOT else [states.kept]
        is_drawn = work.stop - work.start == 1 and work.start >= work.request.prompt_length
        segments.add(work.stop - work.start, read=states.read, writes=[*own, *kept], is_step=is_drawn)
    padding = tokens - sum(segments.lengths)
    if padding:
        segments.add(padding)
    offsets = [0, *accumulate(segments.lengths)]
    return StateTree(
        offsets, segments.parents, device, reads=segments.reads, writes=segments.writes, steps=segments.steps
    )


class _Segments:
    """The segments of a forest, column by column."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.parents: list[int] = []
        self.reads: list[int] = []
        self.writes: list[list[int]] = []
        self.steps: list[bool] = []

    def add(
        self,
        length: int,
        *,
        read: int = NO_SLOT,
        writes: Sequence[int] = (),
        continues: bool = False,
        is_step: bool = False,
    ) -> None:
        """Append a segment: a root, or a continuation of the segment before it."""
        self.parents.append(len(self.lengths) - 1 if continues else -1)
        self.lengths.append(length)
        self.reads.append(read)
        self.writes.append(list(writes))
        self.steps.append(is_step)
