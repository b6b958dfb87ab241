"""The sizes for which kernels are compiled, and the reason if there are none for a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SPLIT = 256
"""The keys of one split. A row's result is the sum over its splits, so another number gives other last bits."""
MIN_LANES = 16
"""Query heads that one product of a GPU computes at least."""
MAX_OFFSET = 2**31


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of a step: where each is in its context, and where the context's keys are. Any integer type."""

    slots: Tensor  # [P]: the row of the table of each row of the step
    positions: Tensor  # [P]: the position of its token
    table: Tensor  # [slots, n]: the blocks of each slot


@dataclass(frozen=True)
class KernelShape:
    """The sizes of the heads and blocks of one cache."""

    query_heads: int
    key_heads: int
    width: int
    block_size: int
    blocks: int
    """The number of blocks of the cache."""
    programs: int = 8
    """The programs for each key head among which the entries are divided."""

    @property
    def group(self) -> int:
        """The number of query heads for each key head."""
        return self.query_heads // self.key_heads

    @property
    def rows_per_entry(self) -> int:
        """The most rows that read a split together: those that fill the lanes of one product."""
        return max(1, MIN_LANES // self.group)

    @property
    def lanes(self) -> int:
        """The query heads of an entry and one key head, padded to a power of two."""
        return max(MIN_LANES, 1 << (self.group * self.rows_per_entry - 1).bit_length())

    def unsupported(self) -> str | None:
        """Return the reason why no kernel computes these sizes, or None."""
        if self.width < 16 or self.width > 256 or self.width & (self.width - 1):
            return f"heads of {self.width} numbers: kernels have 16, 32, 64, 128 and 256"
        if SPLIT % self.block_size:
            return f"blocks of {self.block_size} tokens: kernels have divisors of {SPLIT}"
        if self.blocks * self.block_size * self.width >= MAX_OFFSET:
            return f"a cache of {self.blocks} blocks: kernels count the numbers of one head with 32 bits"
        return None
