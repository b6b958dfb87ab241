"""Columns: one kind of number for each token, row or rollout; selecting entries, and concatenating columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class ColumnKind(Enum):
    """The level that a column has one entry for: token, row or rollout."""

    TOKEN = "token"  # [T]
    TOKEN_K = "token×k"  # [T, k]
    RAGGED = "token-ragged"  # any number for each token: values [N], offsets [T + 1]
    SEQUENCE = "sequence"  # [R] or [R, …]
    UNIT = "unit"  # [U] or [U, …]: one for each rollout
    BLOB = "blob"  # R byte strings, opaque here


@dataclass(frozen=True, eq=False)
class Column:
    """A typed column: its kind, its values, and for the ragged kind the offset of each token's values."""

    kind: ColumnKind
    values: Tensor | tuple[bytes, ...]
    offsets: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The values of any kind but `BLOB`."""
        assert isinstance(self.values, Tensor), "a blob column holds byte strings, not a tensor"
        return self.values


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the ranges of these starts and lengths, end to end: starts [3, 0], lengths [2, 1] → [3, 4, 0]."""
    before = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=starts.device) + torch.repeat_interleave(starts - before, lengths)


def map_tensors(column: Column, function: Callable[[Tensor], Tensor]) -> Column:
    """Apply a function to the tensors of a column: values and offsets."""
    values = column.values if isinstance(column.values, tuple) else function(column.values)
    return Column(column.kind, values, None if column.offsets is None else function(column.offsets))


def select_entries(column: Column, index: Tensor) -> Column:
    """Return the entries at `index` (tokens, rows or rollouts, by the column's kind), in that order."""
    if isinstance(column.values, tuple):
        return Column(column.kind, tuple(column.values[i] for i in index.tolist()))
    if column.offsets is None:
        return Column(column.kind, column.values[index])
    lengths = column.offsets[index + 1] - column.offsets[index]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Column(column.kind, column.values[ranges(column.offsets[index], lengths)], offsets)


def concat_columns(columns: Sequence[Column]) -> Column:
    """Concatenate columns of one kind."""
    first = columns[0]
    if isinstance(first.values, tuple):
        return Column(first.kind, tuple(blob for c in columns for blob in c.values))
    values = torch.cat([c.tensor for c in columns])
    if first.offsets is None:
        return Column(first.kind, values)
    offsets, end = [first.offsets[:1]], 0
    for c in columns:
        assert c.offsets is not None
        offsets.append(c.offsets[1:] + end)
        end += len(c.tensor)
    return Column(first.kind, values, torch.cat(offsets))
