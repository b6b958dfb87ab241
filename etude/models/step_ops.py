"""The operations between the products of a decode step: one token for each row, over an engine's cache.

Every tensor is in a buffer that stays where it is, or is computed from such buffers on the device. Nothing waits for
the device, and no shape depends on data. So a pass can be recorded in a CUDA graph.

`TorchStepOps` has them in torch's operations. An implementation is made once for each pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from etude.models.layer_ops import EAGER_OPS


@dataclass(frozen=True, eq=False)
class StepMemory:
    """The buffers that all passes of a model read and write."""

    keys_values: Tensor  # [layer, keys or values, head, block, position, D], contiguous
    table: Tensor  # [slots, blocks] int64: the blocks of each slot, in order
    cos: Tensor  # [tokens, D]: of each position
    sin: Tensor  # [tokens, D]: the first half is negated; see `layer_ops.apply_rotary`
    fetch_bytes: int
    """The bytes of keys and values of a layer that are gathered at a time."""


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of a pass. A row sees the keys up to its own token."""

    slots: Tensor  # [R] int64: their rows of the table
    positions: Tensor  # [R] int64: of their tokens
    blocks: int
    """The most blocks of a context, known to the host."""


class StepOps(Protocol):
    """The operations of one pass."""

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """[R, H], [R, H] or None for zero → [R, H], [R, H]: their sum, and its RMS norm. Both may be overwritten."""
        ...

    def write(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float) -> Tensor:
        """[R, Hq + 2 Hk, D] → [R, Hq, D]: norm and rotate queries and keys; store keys and values of each row.

        q_norm, k_norm: the weights of the norms [D]; None for a family without them.
        """
        ...

    def attend(self, layer: int, q: Tensor, *, scale: float, window: int | None) -> Tensor:
        """[R, Hq, D] → [R, Hq, D]: attend over the stored keys; see `AttentionFn`."""
        ...

    def gated_silu(self, x: Tensor) -> Tensor:
        """[R, 2I] → [R, I]: silu(gate) · up; the first half is the gate."""
        ...


MakeStepOps: TypeAlias = Callable[[StepMemory, StepRows], StepOps]
"""Makes the operations of a pass."""


class TorchStepOps(StepOps):
    """The operations of a pass in torch's own."""

    def __init__(self, memory: StepMemory, rows: StepRows) -> None:
        self._memory = memory
        _, _, heads, blocks, size, width = memory.keys_values.shape
        self._heads = heads
        self._width = width
        self._cos = memory.cos.index_select(0, rows.positions)
        self._sin = memory.sin.index_select(0, rows.positions)
        self._positions = rows.positions[:, None]
        self._keys = torch.arange(rows.blocks * size, device=rows.slots.device)
        pages = memory.table.index_select(0, rows.slots)[:, : rows.blocks]
        newest = self._positions // size
        self._address = (pages.gather(1, newest) * size + self._positions % size)[:, 0]
        starts = torch.arange(2 * heads, device=rows.slots.device) * blocks
        fetched = starts.view(2, 1, heads, 1) + pages[:, None]  # [2, R, Hk, blocks]
        row_bytes = 2 * heads * rows.blocks * size * width * memory.keys_values.itemsize
        self._parts = torch.split(fetched, max(1, memory.fetch_bytes // row_bytes), 1)
        self._masks: dict[int | None, Tensor] = {}

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = residual + x
        return x, torch.rms_norm(x, weight.shape, None, eps).mul_(weight)  # rounded twice, as the trainer does

    def write(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float) -> Tensor:
        heads = self._heads
        queries = qkv.shape[1] - 2 * heads
        qk, v = torch.split(qkv, [queries + heads, heads], 1)
        if q_norm is not None and k_norm is not None:
            weight = torch.cat([q_norm.expand(queries, -1), k_norm.expand(heads, -1)])
            normed = torch.rms_norm(qkv, q_norm.shape, None, eps)  # of all heads, since a part would be copied first
            qk = normed[:, : queries + heads] * weight
        q, k = torch.split(EAGER_OPS.apply_rotary(qk, self._cos, self._sin), [queries, heads], 1)
        for memory, new in zip(self._memory.keys_values[layer], (k, v), strict=True):
            memory.flatten(1, 2).transpose(0, 1).index_copy_(0, self._address, new)
        return q

    def attend(self, layer: int, q: Tensor, *, scale: float, window: int | None) -> Tensor:
        mask = self._mask(window)
        blocks = self._memory.keys_values[layer].flatten(0, 2).flatten(1)
        first = 0
        outputs = []
        for pages in self._parts:
            stop = first + pages.shape[1]
            outputs.append(self._attend(q[first:stop], blocks, pages, mask[first:stop], scale))
            first = stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def gated_silu(self, x: Tensor) -> Tensor:
        return EAGER_OPS.gated_silu(x)

    def _attend(self, q: Tensor, blocks: Tensor, pages: Tensor, mask: Tensor, scale: float) -> Tensor:
        """[n, Hq, D] → [n, Hq, D]: attend over the blocks of these rows. pages: [2, n, Hk, blocks] of them."""
        rows = len(q) * self._heads
        keys, values = blocks.index_select(0, pages.flatten()).view(2, rows, -1, self._width)
        scores = torch.bmm(q.reshape(rows, -1, self._width), keys.transpose(1, 2))
        scores = scores.view(len(q), self._heads, -1, scores.shape[-1])
        weights = torch.softmax(torch.add(mask, scores, alpha=scale), -1).to(q.dtype)
        return torch.bmm(weights.flatten(0, 1), values).view(q.shape)

    def _mask(self, window: int | None) -> Tensor:
        """[R, 1, 1, keys]: 0 where a row sees a key, −inf elsewhere."""
        if window not in self._masks:
            hidden = self._keys > self._positions
            if window is not None:
                hidden = hidden | (self._keys <= self._positions - window)
            mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks[window]
