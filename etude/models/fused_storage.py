"""Parameters of one storage: leaves of their own to whoever trains them, one matrix to whoever multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["fuse_storage"]


def fuse_storage(parameters: Sequence[Any]) -> Tensor:
    """The parameters end to end; each becomes a view of its part. Those that stand so already stay where they are."""
    held: list[Tensor] = [parameter.data for parameter in parameters]
    if not _are_adjacent(held):
        whole = torch.cat(held)
        for parameter, part in zip(parameters, torch.split(whole, [len(each) for each in held]), strict=True):
            parameter.data = part
        return whole
    return held[0].as_strided((sum(map(len, held)), *held[0].shape[1:]), held[0].stride())


def _are_adjacent(held: Sequence[Tensor]) -> bool:
    """Whether each begins in memory where the one before it ends."""
    storages = {each.untyped_storage().data_ptr() for each in held}
    follow = all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(held))
    return len(storages) == 1 and follow and all(each.is_contiguous() for each in held)
