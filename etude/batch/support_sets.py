"""The table of token sets that a batch's column `support` names: which tokens the sampler could draw from.

It is `etude.support` as tensors. The sets of a batch stand in it once each, since most tokens share a few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.batch.columns import ranges
from etude.errors import BatchError
from etude.support import SetKind, Support

_WORD_BITS = 32


@dataclass(frozen=True, eq=False)
class SupportSets:
    """S different sets of tokens."""

    kind: Tensor
    """[S] int8: the form of each set, a `SetKind`."""
    offsets: Tensor
    """[S + 1] int64: set s is data[offsets[s] : offsets[s + 1]]."""
    data: Tensor
    """[N] int32."""

    @classmethod
    def from_support(cls, support: Support) -> SupportSets:
        """Return the table of an answer's, or of a batch's, sets."""
        return cls(*(torch.from_numpy(each.copy()) for each in (support.kind, support.offsets, support.data)))

    @classmethod
    def concat(cls, tables: Sequence[SupportSets]) -> SupportSets:
        """Join tables end to end."""
        sizes = torch.cat([table.offsets.diff() for table in tables])
        return cls(
            torch.cat([table.kind for table in tables]),
            torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
            torch.cat([table.data for table in tables]),
        )

    def to(self, device: torch.device | str) -> SupportSets:
        """Return the same table on another device."""
        return SupportSets(self.kind.to(device), self.offsets.to(device), self.data.to(device))

    def select(self, index: Tensor) -> tuple[Tensor, SupportSets]:
        """Return the table of the sets that these tokens use, and the tokens' places in it."""
        used, place = torch.unique(index, return_inverse=True)
        missing = int((used < 0).sum())  # tokens of the whole vocabulary come first
        used = used[missing:].long()
        sizes = self.offsets[used + 1] - self.offsets[used]
        kept = SupportSets(
            self.kind[used],
            torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
            self.data[ranges(self.offsets[used], sizes)],
        )
        return (place - missing).to(index.dtype), kept

    def sizes(self, vocab_size: int) -> Tensor:
        """[S]: return how many tokens are in each set."""
        lengths = self.offsets.diff()
        sizes = torch.where(self.kind == SetKind.BANNED, vocab_size - lengths, lengths)
        sets = (self.kind == SetKind.BITS).nonzero()[:, 0]
        if len(sets):
            sizes[sets] = self._unpack_bits(sets, vocab_size).sum(1)
        return sizes

    def mask(self, index: Tensor, vocab_size: int) -> Tensor:
        """[n] places → [n, V]: return which tokens could be drawn; all of them at place -1."""
        sets = index.long()
        kind = torch.cat([self.kind, self.kind.new_full((1,), -1)])[sets]  # -1 reads the entry at the end
        allowed = (kind != SetKind.KEPT)[:, None].repeat(1, vocab_size)
        rows = ((kind == SetKind.KEPT) | (kind == SetKind.BANNED)).nonzero()[:, 0]
        of_rows, ids = self.listed(sets[rows])
        listed = rows[of_rows]
        allowed[listed, ids] = kind[listed] == SetKind.KEPT
        rows = (kind == SetKind.BITS).nonzero()[:, 0]
        if len(rows):
            different, which = torch.unique(sets[rows], return_inverse=True)
            allowed[rows] = self._unpack_bits(different, vocab_size)[which]
        return allowed

    def lists_at_most(self, index: Tensor, count: int) -> Tensor:
        """[n] places → [n] bool: return which of these sets are stored as at most `count` ids that are in them."""
        small = (self.kind == SetKind.KEPT) & (self.offsets.diff() <= count)
        return torch.cat([small, small.new_zeros(1)])[index.long()]  # -1 reads the entry at the end

    def listed(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """[n] places of listed sets → all of their ids end to end, and before them the row of each."""
        sets = index.long()
        sizes = self.offsets[sets + 1] - self.offsets[sets]
        rows = torch.arange(len(sets), device=sets.device).repeat_interleave(sizes)
        return rows, self.data[ranges(self.offsets[sets], sizes)].long()

    def listed_mask(self, index: Tensor, words: Tensor) -> Tensor:
        """[n] places of sets of the form `KEPT`, [W] ascending ids → [n, W]: return which of these are in each set.

        All ids of the sets are among `words`.
        """
        rows, ids = self.listed(index)
        allowed = torch.zeros(len(index), len(words), dtype=torch.bool, device=words.device)
        allowed[rows, torch.searchsorted(words, ids)] = True
        return allowed

    def _unpack_bits(self, sets: Tensor, vocab_size: int) -> Tensor:
        """[m] sets of the form `BITS` → [m, V]."""
        words = -(-vocab_size // _WORD_BITS)
        if bool((self.offsets[sets + 1] - self.offsets[sets] != words).any()):
            raise BatchError(
                f"The sampler recorded sets of another vocabulary than the model's, which has {vocab_size} tokens. "
                "Train the model that sampled."
            )
        data = self.data[self.offsets[sets][:, None] + torch.arange(words, device=sets.device)]
        bits = data[:, :, None] >> torch.arange(_WORD_BITS, device=sets.device, dtype=data.dtype) & 1
        return bits.flatten(1)[:, :vocab_size].bool()
