"""The sizes for which kernels are compiled, and the list of work of attention on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SPLIT = 256
"""The keys of one split. A row's result is the sum over its splits, so another number gives other last bits."""
MIN_LANES = 16
"""Query heads that one product of a GPU computes at least."""
MAX_PARTIAL = 2**31
"""The most bytes of partial results, which all rows of the longest contexts have."""
WAVES = 3
"""The programs that a multiprocessor of a GPU runs at once, by the registers of the attention kernel."""
WIDTHS = (16, 32, 64, 128, 256)
MAX_OFFSET = 2**31
"""The numbers of one head in a layer, which the kernel counts with 32 bits."""


@dataclass(frozen=True)
class KernelShape:
    """The sizes of a model's heads, and of the blocks of its cache."""

    query_heads: int
    key_heads: int
    width: int
    block_size: int

    @property
    def rows_per_entry(self) -> int:
        """The most rows that read a split together: those that fill the lanes of one product."""
        return max(1, MIN_LANES * self.key_heads // self.query_heads)

    def partial_bytes(self, parts: int) -> int:
        """Return the memory for the partial results of so many splits of rows."""
        return 4 * parts * self.query_heads * self.width

    def unsupported(self, blocks: int, parts: int) -> str | None:
        """Return the reason why no kernel attends over a cache of so many blocks, with so many partial results."""
        if self.width not in WIDTHS:
            return f"heads have {self.width} numbers, not {', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}"
        if SPLIT % self.block_size:
            return f"blocks have {self.block_size} tokens, which does not divide {SPLIT}"
        if blocks * self.block_size * self.width >= MAX_OFFSET:
            return f"the cache has {blocks} blocks, more than 32 bits count"
        if self.partial_bytes(parts) > MAX_PARTIAL:
            return f"partial results of all rows would take {self.partial_bytes(parts) / 2**30:.1f} GiB"
        return None


@dataclass(frozen=True, eq=False)
class AttentionWork:
    """The list of work on the device, and the memory for partial results."""

    entries: Tensor  # [E, 1 + R] int32: a split, and the rows that read it; −1 behind the last
    count: Tensor  # [1] int32: the entries that are used
    partial: Tensor  # [rows, splits, Hq, D] float32
    partial_lse: Tensor  # [rows, splits, Hq] float32
    programs: int
    """The programs for each key head among which the entries are divided."""

    @classmethod
    def allocate(cls, shape: KernelShape, *, rows: int, splits: int, device: torch.device) -> AttentionWork:
        """Return memory for the work of so many rows, of contexts of so many splits."""
        return cls(
            entries=torch.zeros(rows * splits, 1 + shape.rows_per_entry, dtype=torch.int32, device=device),
            count=torch.zeros(1, dtype=torch.int32, device=device),
            partial=torch.zeros(rows, splits, shape.query_heads, shape.width, device=device),
            partial_lse=torch.zeros(rows, splits, shape.query_heads, device=device),
            programs=_count_programs(shape, device),
        )

    @property
    def rows_per_entry(self) -> int:
        """The most rows of an entry."""
        return self.entries.shape[1] - 1

    def load(self, entries: Tensor) -> None:
        """Replace the entries by [n, 1 + R] int32 of the host, without a wait for the device."""
        sent = entries.pin_memory() if self.entries.is_cuda else entries
        self.entries[: len(entries)].copy_(sent, non_blocking=True)
        self.count.fill_(len(entries))

    def tensors(self) -> list[Tensor]:
        """Return all buffers."""
        return [self.entries, self.count, self.partial, self.partial_lse]


def _count_programs(shape: KernelShape, device: torch.device) -> int:
    """Return the number of programs for each key head that fill the device."""
    if device.type != "cuda":
        return 2
    return max(1, WAVES * torch.cuda.get_device_properties(device).multi_processor_count // shape.key_heads)
