"""Count the memory that autograd holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["kept_for_backward"]


def kept_for_backward(act: Callable[[], object]) -> int:
    """Count the bytes that are kept for the backward pass of a computation."""
    total = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        act()
    return total
