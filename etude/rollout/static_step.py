"""A decode step of static shape: the model over one token of each row, and the draw.

It reads and writes buffers that stay where they are, never waits for the device, and has no shape that depends on data.
So the host can launch a step before it has read the tokens of the step before, and a CUDA graph can record it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.models import MakeStepOps, Model, StepMemory, StepRows, TorchStepOps
from etude.rollout.attention_groups import CPU_LIMITS, GPU_LIMITS
from etude.rollout.device_sampling import draw
from etude.rollout.kv_cache import KVCache
from etude.rollout.slot_state import SlotState

if TYPE_CHECKING:
    from etude.rollout.step_kernels import StepKernels


@dataclass(frozen=True)
class StepKey:
    """The shapes of a step."""

    rows: int
    blocks: int
    """The most blocks of a context."""
    filtered: bool
    """False if no row has more than a temperature."""


def supports_static(model: Model) -> str | None:
    """Return the reason why a model has no static steps; None if it has them."""
    if model.own_layers is None:
        return f"a {model.module.config.model_type} model runs transformers' own layers"
    if model.has_score_head:
        return "its head gives a score and draws no tokens"
    return None


class StaticStep:
    """The decode steps of a model over one cache."""

    def __init__(self, model: Model, cache: KVCache, state: SlotState, kernels: StepKernels | None = None) -> None:
        layers = model.own_layers
        assert layers is not None, "see `supports_static`"
        self.model = model
        self.state = state
        self.results = torch.zeros((3, len(state.row_slots)), dtype=torch.float64, device=model.device)
        """[3, rows]: of each row the drawn token, its probability, and its log-prob under the model."""
        self._layers = layers
        self._kernels = kernels
        self._make_ops: MakeStepOps = kernels or TorchStepOps
        length = min(model.context_length, state.table.shape[1] * cache.size)
        cos, sin = layers.rotary_table(length)
        limits = GPU_LIMITS if cache.device.type == "cuda" else CPU_LIMITS
        self.memory = StepMemory(
            keys_values=cache.memory.view(-1, 2, cache.heads, cache.blocks, cache.size, cache.width),
            table=state.table,
            cos=cos,
            sin=sin,
            fetch_bytes=limits.fetch_bytes,
        )

    @property
    def has_bound(self) -> bool:
        """True if the operations need a bound of the contexts: all keys up to it are read."""
        return self._kernels is None or not self._kernels.has_attention

    def set_rows(self, slots: Sequence[int], lengths: Sequence[int], count: int, table: NDArray[np.int64]) -> None:
        """Let the first rows of the next step be these slots, and the rest of `count` rows scratch.

        lengths: of their contexts, with the newest token. table: the blocks of each slot.
        """
        self.state.set_rows(slots, count)
        if self._kernels is not None:
            self._kernels.set_rows(slots, lengths, count, table)

    def compute(self, key: StepKey) -> None:
        """Draw the next token of the first rows, and advance their slots."""
        state = self.state
        slots = state.row_slots[: key.rows]
        lengths = state.length.index_select(0, slots)
        ops = self._make_ops(self.memory, StepRows(slots, lengths - 1, key.blocks))
        hidden = self._layers.decode(state.last.index_select(0, slots), ops)
        drawn = draw(self.model.logits(hidden), state.parameters.select(slots, filtered=key.filtered), lengths)
        state.advance(slots, drawn.ids, filtered=key.filtered)
        for result, values in zip(self.results, (drawn.ids, drawn.probability, drawn.raw_logp), strict=True):
            result[: key.rows].copy_(values)

    def tensors(self) -> list[Tensor]:
        """Return all tensors that stay where they are: buffers, cache and weights."""
        memory = self.memory
        own = [self.results, memory.keys_values, memory.cos, memory.sin]
        if self._kernels is not None:
            own += self._kernels.tensors()
        return [*own, *self.state.tensors(), *self.model.parameters()]
