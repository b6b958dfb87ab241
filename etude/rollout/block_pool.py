"""The blocks of the KV cache: which request holds which, and which can be found again.

A block holds the keys and values of a fixed number of consecutive tokens. A full block is registered under its parent
node and its own tokens. These are compared exactly, never by a hash alone. Requests that begin with the same tokens
hold the same blocks. A block that no request holds stays registered until its memory is needed. The block that is
unused for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

ROOT = 0
"""The parent node of a sequence's first block."""


NO_SLOT = -1
"""The slot of a state that is zero, or that is not kept."""


class KeptStates:
    """The slots with states of recurrent layers at the ends of nodes, for later requests with the same beginning."""

    def __init__(self, slots: Sequence[int] = ()) -> None:
        self._slots = list(slots)
        self.clear()

    def clear(self) -> None:
        """Free all slots."""
        self._free = self._slots[::-1]
        self._reserved: set[int] = set()
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # of each node, the one unused for longest first

    def reserve(self, node: int) -> int:
        """Return a slot for the state at the end of a node; `NO_SLOT` if it has one, or if there are no slots.

        The state that is unused for longest is given up. A step may still read it, as it reads before it writes.
        """
        if node in self._slot_of or node in self._reserved or not (self._free or self._slot_of):
            return NO_SLOT
        self._reserved.add(node)
        return self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]

    def keep(self, node: int, slot: int) -> None:
        """Let later requests find the state in this slot, which is written now."""
        self._reserved.discard(node)
        self._slot_of[node] = slot

    def find(self, node: int) -> int:
        """Return the slot with the state at the end of a node, or `NO_SLOT`."""
        if node not in self._slot_of:
            return NO_SLOT
        self._slot_of.move_to_end(node)
        return self._slot_of[node]

    def forget(self, node: int) -> None:
        """Free the slot of a node whose block is no longer registered."""
        slot = self._slot_of.pop(node, None)
        if slot is not None:
            self._free.append(slot)


class BlockPool:
    """The blocks of one cache: `allocate` and `release`, `register` and `match_prefix`. It touches no tensor."""

    def __init__(self, count: int, size: int, states: KeptStates | None = None) -> None:
        """states: kept at the ends of blocks, for a model with recurrent layers."""
        self.count = count
        self.size = size
        self.states = states or KeptStates()
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

    def cut_to_state(self, blocks: list[int]) -> tuple[list[int], int, int]:
        """Give up the held blocks behind the last one that ends with a kept state.

        Returns the others, the node at which they end, and the slot of the state.
        """
        for depth in range(len(blocks), 0, -1):
            node = self._node[blocks[depth - 1]]
            slot = self.states.find(node)
            if slot != NO_SLOT:
                self.release(blocks[depth:])
                return blocks[:depth], node, slot
        self.release(blocks)
        return [], ROOT, NO_SLOT

    def reset_prefix_cache(self) -> None:
        """Unregister all blocks, since the weights that computed them have changed."""
        for block in list(self._known.values()):
            self._unregister(block)
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self.states.clear()

    def _unregister(self, block: int) -> None:
        key = self._key[block]
        assert key is not None, "only a registered block can be unregistered"
        del self._known[key]
        self._key[block] = None
        self.states.forget(self._node[block])
