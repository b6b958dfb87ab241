"""Which request holds which blocks of the key-value cache, and which blocks are already known.

A block holds the keys and values of a fixed number of consecutive tokens. A full block is known by what it continues
and by its own tokens, compared exactly and never by a hash alone: requests that begin with the same tokens hold the
same blocks. A block that nobody holds stays known until its memory is needed; the one unused for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROOT", "BlockPool"]

ROOT = 0
"""The node that a sequence's first block continues."""


class BlockPool:
    """The blocks of one cache: `take` and `release`, `learn` and `match`. Bookkeeping only; no tensor is touched."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))
        self._ref_counts = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, held by nobody, oldest first
        self._known: dict[tuple[int, bytes], int] = {}
        self._key: list[tuple[int, bytes] | None] = [None] * count
        self._node = [ROOT] * count
        self._last_node = ROOT

    @property
    def available(self) -> int:
        """How many blocks `take` can still give."""
        return len(self._free) + len(self._idle)

    @property
    def in_use(self) -> int:
        """How many blocks some request holds."""
        return self.count - self.available

    def allocate(self) -> int:
        """A block of one's own. One must be available."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._unregister(block)
        self._ref_counts[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Hold a block that is known or that another holds."""
        self._idle.pop(block, None)
        self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Hold these blocks of one sequence, given in its order, no longer. Its end is forgotten before its start."""
        for block in reversed(list(blocks)):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, "a block was released more often than held"
            if self._ref_counts[block] == 0:
                if self._key[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def register(self, block: int, parent: int, tokens: NDArray[np.int32]) -> int:
        """Make a full block known as the continuation of node `parent`; returns the node that continues from it."""
        key = (parent, tokens.tobytes())
        known = self._known.setdefault(key, block)
        if known == block and self._key[block] is None:
            self._last_node += 1
            self._key[block], self._node[block] = key, self._last_node
        return self._node[known]

    def match_prefix(self, tokens: NDArray[np.int32], max_blocks: int) -> tuple[list[int], int]:
        """The known blocks that these tokens begin with, at most `most`, now held; and the node they end at."""
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
        """Know nothing any more: the weights behind what was known have changed."""
        for block in list(self._known.values()):
            self._unregister(block)
        self._free.extend(reversed(self._idle))
        self._idle.clear()

    def _unregister(self, block: int) -> None:
        key = self._key[block]
        assert key is not None, "only a known block can be forgotten"
        del self._known[key]
        self._key[block] = None
