"""The sizes for which kernels are compiled, and the list of work of attention on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SPLIT = 256
"""The keys of one split. A row's result is the sum over its splits, so another number gives other last bits."""
MIN_LANES = 16
"""Query heads that one product of a GPU computes at least."""
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

    def unsupported(self, blocks: int) -> str | None:
        """Return the reason why no kernel attends over a cache of so many blocks, or None."""
        if self.width not in WIDTHS:
            return f"heads have {self.width} numbers, not {', '.join(map(str, WIDTHS[:-1]))} or {WIDTHS[-1]}"
        if SPLIT % self.block_size:
            return f"blocks have {self.block_size} tokens, which does not divide {SPLIT}"
        if blocks * self.block_size * self.width >= MAX_OFFSET:
            return f"the cache has {blocks} blocks, more than 32 bits count"
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
