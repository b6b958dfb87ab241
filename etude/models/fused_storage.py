"""Parameters in one storage: separate leaves for the optimizer, one matrix for products."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def fuse_storage(parameters: Sequence[Any]) -> Tensor:
    """Return the concatenated parameters, and make each a view of its part. Adjacent parameters are not moved."""
    tensors: list[Tensor] = [parameter.data for parameter in parameters]
    if not _are_adjacent(tensors):
        fused = torch.cat(tensors)
        for parameter, part in zip(parameters, torch.split(fused, [len(tensor) for tensor in tensors]), strict=True):
            parameter.data = part
        return fused
    return tensors[0].as_strided((sum(map(len, tensors)), *tensors[0].shape[1:]), tensors[0].stride())


def _are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Return true if each tensor begins in memory where the one before it ends."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    adjacent = all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(tensors))
    return len(storages) == 1 and adjacent and all(tensor.is_contiguous() for tensor in tensors)
