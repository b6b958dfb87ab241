"""Logits of rows whose token was drawn from a set: the tokens outside of it are made impossible."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etude.batch import SupportSets


@dataclass(frozen=True, eq=False)
class TokenSets:
    """The sets of N rows of logits."""

    index: Tensor
    """[N] int32: the place of each row's set in the table; -1 is the whole vocabulary."""
    table: SupportSets

    def restrict_(self, logits: Tensor, start: int) -> Tensor:
        """Set logits [n, V] of the rows from `start` to -inf outside of their sets, in place; return them."""
        rows = self._bound_rows(logits, start)
        if len(rows) == len(logits):
            logits.masked_fill_(self._outside(rows + start, logits), -torch.inf)
        elif len(rows):
            logits[rows] = logits[rows].masked_fill_(self._outside(rows + start, logits), -torch.inf)
        return logits

    def restrict(self, logits: Tensor, start: int) -> Tensor:
        """Return logits [n, V] of the rows from `start`, with -inf outside of their sets. It has a gradient."""
        if not len(self._bound_rows(logits, start)):
            return logits
        rows = torch.arange(start, start + len(logits), device=logits.device)
        return logits.masked_fill(self._outside(rows, logits), -torch.inf)

    def _bound_rows(self, logits: Tensor, start: int) -> Tensor:
        return (self.index[start : start + len(logits)] >= 0).nonzero()[:, 0]

    def _outside(self, rows: Tensor, logits: Tensor) -> Tensor:
        return self.table.mask(self.index[rows], logits.shape[1]).logical_not_()
