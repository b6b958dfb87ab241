"""Logits of rows whose token was drawn from a set: the tokens outside of it are made impossible.

Most sets of a filter list a few tokens. Rows with such sets need no logits of other tokens, so `split_rows` puts them
together, with the part of the vocabulary that any of them lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etude.batch import SupportSets

FEW = 64
"""The most ids of a set that `split_rows` calls small."""
SHARE = 8
"""Rows with small sets are computed over at most the vocabulary's 1 / SHARE."""


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows whose logits are computed at a time."""

    rows: slice | Tensor
    words: Tensor | None = None
    """[W] ids, ascending: those of the vocabulary that have logits. None: all."""

    def columns(self, ids: Tensor) -> Tensor:
        """[N] → [n, 1]: return the column of the logits that belongs to each of the rows' tokens."""
        own = ids[self.rows].long()
        return (own if self.words is None else torch.searchsorted(self.words, own))[:, None]


@dataclass(frozen=True, eq=False)
class TokenSets:
    """The sets of N rows of logits."""

    index: Tensor
    """[N] int32: the place of each row's set in the table; -1 is the whole vocabulary."""
    table: SupportSets

    def restrict_(self, logits: Tensor, part: HeadRows) -> Tensor:
        """Set logits [n, W] of these rows to -inf outside of their sets, in place; return them."""
        index = self.index[part.rows]
        if part.words is not None:
            return logits.masked_fill_(self.table.listed_mask(index, part.words).logical_not_(), -torch.inf)
        bound = (index >= 0).nonzero()[:, 0]
        if len(bound) == len(index):
            logits.masked_fill_(self._outside(index, logits), -torch.inf)
        elif len(bound):
            logits[bound] = logits[bound].masked_fill_(self._outside(index[bound], logits), -torch.inf)
        return logits

    def restrict(self, logits: Tensor, rows: slice) -> Tensor:
        """Return logits [n, V] of these rows, with -inf outside of their sets. It has a gradient."""
        index = self.index[rows]
        if not bool((index >= 0).any()):
            return logits
        return logits.masked_fill(self._outside(index, logits), -torch.inf)

    def _outside(self, index: Tensor, logits: Tensor) -> Tensor:
        return self.table.mask(index, logits.shape[1]).logical_not_()


def split_rows(rows: int, chunk: int, sets: TokenSets | None, vocab_size: int) -> list[HeadRows]:
    """Return the parts that the logits of `rows` rows are computed in, at most `chunk` rows each."""
    few = min(FEW, vocab_size // SHARE)
    small = torch.zeros(0) if sets is None or not few else sets.table.lists_at_most(sets.index, few)
    if sets is None or not bool(small.any()):
        return [HeadRows(slice(start, start + chunk)) for start in range(0, rows, chunk)]
    parts = [HeadRows(part) for part in torch.split((~small).nonzero()[:, 0], chunk) if len(part)]
    for part in torch.split(small.nonzero()[:, 0], min(chunk, max(vocab_size // SHARE // few, 1))):
        words: Tensor = torch.unique(sets.table.listed(sets.index[part])[1])
        parts.append(HeadRows(part, words))
    return parts
