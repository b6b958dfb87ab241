"""The blocks of the KV cache: which request holds which, and which can be found again.

A block holds the keys and values of a fixed number of consecutive tokens. A full block is registered under its parent
node and its own tokens. These are compared exactly, never by a hash alone. Requests that begin with the same tokens
hold the same blocks. A block that no request holds stays registered until its memory is needed. The block that is
unused for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

ROOT = 0
"""The parent node of a sequence's first block."""


class BlockPool:
    """The blocks of one cache: `allocate` and `release`, `register` and `match_prefix`. It touches no tensor."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))
        self._ref_counts = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # registered blocks that no request holds, oldest first
        self._known: dict[tuple[int, bytes], int] = {}
        self._key: list[tuple[int, bytes] | None] = [None] * count
        self._node = [ROOT] * count
        self._last_node = ROOT

    @property
    def available(self) -> int:
        """The number of blocks that `allocate` can still give."""
        return len(self._free) + len(self._idle)

    @property
    def in_use(self) -> int:
        """The number of blocks that requests hold."""
        return self.count - self.available

    def allocate(self) -> int:
        """Return a block for one request alone. One must be available."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._unregister(block)
        self._ref_counts[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Hold a block that is registered or that another request holds."""
        self._idle.pop(block, None)
        self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up these blocks of one sequence, in its order. The end of the sequence is evicted before its start."""
        for block in reversed(list(blocks)):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, "a block was released more often than held"
            if self._ref_counts[block] == 0:
                if self._key[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def register(self, block: int, parent: int, tokens: NDArray[np.int32]) -> int:
        """Register a full block as the continuation of node `parent`. Return the node that continues from it."""
        key = (parent, tokens.tobytes())
        known = self._known.setdefault(key, block)
        if known == block and self._key[block] is None:
            self._last_node += 1
            self._key[block], self._node[block] = key, self._last_node
        return self._node[known]

    def match_prefix(self, tokens: NDArray[np.int32], max_blocks: int) -> tuple[list[int], int]:
        """Find and hold the registered blocks, at most `max_blocks`, that these tokens begin with.

        Returns the blocks and the node at which they end.
        """
        blocks: list[int] = []
        node = ROOT
        for start in range(0, max_blocks * self.size, self.size):
            block = self._known.get((node, tokens[start : start + self.size].tobytes()))
            if block is None:
                break
            self.retain(block)
            blocks.append(block)
            node = self._node[block]
        return blocks, node

    def reset_prefix_cache(self) -> None:
        """Unregister all blocks, since the weights that computed them have changed."""
        for block in list(self._known.values()):
            self._unregister(block)
        self._free.extend(reversed(self._idle))
        self._idle.clear()

    def _unregister(self, block: int) -> None:
        key = self._key[block]
        assert key is not None, "only a registered block can be unregistered"
        del self._known[key]
        self._key[block] = None
