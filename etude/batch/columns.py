"""Columns: one kind of number for each token or rollout."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class ColumnKind(Enum):
    """The level that a column has one entry for."""

    TOKEN = "token"  # [T]
    TOKEN_K = "token×k"  # [T, k]
    UNIT = "unit"  # [U] or [U, …]: one for each rollout


@dataclass(frozen=True, eq=False)
class Column:
    """A column and its kind."""

    kind: ColumnKind
    tensor: Tensor


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the ranges of these starts and lengths, end to end: starts [3, 0], lengths [2, 1] → [3, 4, 0]."""
    before = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=starts.device) + torch.repeat_interleave(starts - before, lengths)
