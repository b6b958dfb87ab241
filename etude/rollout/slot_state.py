"""The state of running requests on the device, by slot, for decode steps of static shape.

A request's slot is its row of the block table. One more slot is scratch: rows of a step without a request name it. Its
context is one token, in a block that no request gets. All tensors stay where they are, so a CUDA graph may hold them.

    join       the host writes all of a request, when it begins to be computed here
    grow       the host appends blocks
    set_rows   the host names the slots of a step's rows
    advance    a step writes each row's drawn token, and adds one to its length
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from etude.models import Model
from etude.records import SamplingParams
from etude.rollout.device_sampling import DrawParameters
from etude.rollout.request import Request
from etude.rollout.sampling import SamplingState


class NewBlock(NamedTuple):
    """A block that a request got."""

    slot: int
    place: int
    """Its place among the request's blocks."""
    block: int


class SlotState:
    """The tensors that a decode step reads and writes, by slot."""

    def __init__(self, model: Model, *, slots: int, max_blocks: int, scratch_block: int) -> None:
        """max_blocks: of a request. scratch_block: the block of rows without a request."""
        self.device = model.device
        self.scratch = slots
        """The slot of rows without a request."""
        self._vocab_size = model.vocab_size
        count = slots + 1
        self.table = self._full((count, max_blocks), scratch_block)
        self.last = self._full((count,), 0)
        """The newest token of each context, whose keys and values are not computed yet."""
        self.length = self._full((count,), 1)
        """The number of tokens of each context, with the newest."""
        self.row_slots = self._full((slots,), self.scratch)
        """The slot of each row of the next step."""
        neutral = SamplingState(SamplingParams(), np.empty(0, np.int32), model.vocab_size, frozenset())
        parameters = DrawParameters.of([neutral] * count, [0] * count, model.vocab_size)
        self.parameters = parameters.map(lambda values: values.to(self.device).contiguous())
        self._rows: list[int] = []

    def join(self, requests: Sequence[Request]) -> None:
        """Write the state of these running requests to their slots."""
        slots = self._to([request.slot for request in requests])
        last = self._to([int(request.tokens[request.length - 1]) for request in requests])
        self.last.index_copy_(0, slots, last)
        self.length.index_copy_(0, slots, self._to([request.length for request in requests]))
        width = max(len(request.blocks) for request in requests)
        blocks = np.array(
            [request.blocks + request.blocks[-1:] * (width - len(request.blocks)) for request in requests]
        )
        self.table[:, :width].index_copy_(0, slots, self._to(blocks))
        states = [request.sampling_state for request in requests]
        joined = DrawParameters.of(states, [request.prompt_length for request in requests], self._vocab_size)
        some_punish = any(state.seen is not None for state in states)
        for kept, new in zip(self.parameters.tensors(), joined.tensors(), strict=True):
            if some_punish or new.dtype != torch.bool:  # the seen tokens, a row of the vocabulary's size each
                kept.index_copy_(0, slots, self._send(new))

    def grow(self, new_blocks: Sequence[NewBlock]) -> None:
        """Append blocks to requests that have joined."""
        width = self.table.shape[1]
        addresses = self._to([new.slot * width + new.place for new in new_blocks])
        self.table.view(-1).index_copy_(0, addresses, self._to([new.block for new in new_blocks]))

    def set_rows(self, slots: Sequence[int], count: int) -> None:
        """Let the first rows of the next step be these slots, and the rest of `count` rows scratch."""
        rows = [*slots, *[self.scratch] * (count - len(slots))]
        if rows != self._rows:
            self.row_slots[:count].copy_(self._to(rows), non_blocking=True)
            self._rows = rows

    def advance(self, slots: Tensor, drawn: Tensor, *, filtered: bool) -> None:
        """Append the drawn tokens [R] to the contexts of the slots [R]. filtered: some of them punish repetition."""
        self.last.index_copy_(0, slots, drawn)
        self.length.index_add_(0, slots, torch.ones_like(slots))
        self.length[self.scratch :].fill_(1)
        filters = self.parameters.filters
        if filtered and filters is not None:
            filters.seen.view(-1).index_fill_(0, slots * filters.seen.shape[1] + drawn, True)

    def tensors(self) -> list[Tensor]:
        """Return all buffers."""
        return [self.table, self.last, self.length, self.row_slots, *self.parameters.tensors()]

    def _full(self, shape: tuple[int, ...], value: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=self.device)

    def _to(self, values: ArrayLike) -> Tensor:
        return self._send(torch.from_numpy(np.asarray(values, dtype=np.int64)))

    def _send(self, values: Tensor) -> Tensor:
        """Return the values on the device, without a wait for it."""
        return values.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else values
