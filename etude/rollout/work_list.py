"""The list of work of the attention kernel: rows of a step that read the same split of keys share an entry.

A row reads the splits of its context from the first to the one of its own position. Rows whose tables hold the same
block at the end of a whole split have the same tokens up to there: a filled block belongs to one beginning. So answers
to one prompt share the entries of its whole splits, and tokens of one request share all their splits. The list stays
the same until a row joins, leaves or enters its next split; positions inside a split are read by the kernel.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class WorkList:
    """The entries for the rows of the next step."""

    def __init__(self, *, split: int, block_size: int, rows_per_entry: int) -> None:
        """split: the keys of a split, a multiple of `block_size`, the tokens of a block."""
        assert split % block_size == 0
        self._split = split
        self._blocks_per_split = split // block_size
        self._rows_per_entry = rows_per_entry
        self._made_for: tuple[IntArray, IntArray] | None = None
        self.entries: NDArray[np.int32] = np.empty((0, 1 + rows_per_entry), dtype=np.int32)
        """[E, 1 + R]: the split of each entry, then its rows; −1 behind the last."""

    def update(self, slots: IntArray, positions: IntArray, table: IntArray) -> bool:
        """Make the entries for these rows; return false if they are those of the step before.

        slots, positions: the slot of each row, and the position of its token. table: the blocks of each slot, as far as
        its rows have whole splits.
        """
        last = positions // self._split
        counts = last + 1
        row = np.repeat(np.arange(len(slots)), counts)
        split = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        slot = slots[row]
        is_whole = split < last[row]
        held = -1 - slot  # of the last split: only rows of the same slot share it
        last_block = (split[is_whole] + 1) * self._blocks_per_split - 1
        held[is_whole] = table[slot[is_whole], last_block]
        if self._made_for is not None and all(map(np.array_equal, self._made_for, (counts, held))):
            return False
        self._made_for = (counts, held)
        self.entries = self._group(row, split, held)
        return True

    def _group(self, row: IntArray, split: IntArray, held: IntArray) -> NDArray[np.int32]:
        """Return the entries: rows with the same split and the same keys in it, up to R at once."""
        order = np.lexsort((row, held, split))
        row = row[order]
        split = split[order]
        held = held[order]
        index = np.arange(len(row))
        is_first = np.ones(len(row), dtype=bool)
        is_first[1:] = (split[1:] != split[:-1]) | (held[1:] != held[:-1])
        place = (index - np.maximum.accumulate(np.where(is_first, index, 0))) % self._rows_per_entry
        entry = np.cumsum(place == 0) - 1
        entries = np.full((np.count_nonzero(place == 0), 1 + self._rows_per_entry), -1, dtype=np.int32)
        entries[:, 0] = split[place == 0]
        entries[entry, 1 + place] = row
        return entries
