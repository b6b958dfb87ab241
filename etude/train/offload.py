"""What a GPU need not hold all the time: moved to the processor's memory while it rests, and back when it works.

    collecting    engine awake: keys and values      optimizer away
    updating      engine asleep                      optimizer here

So the two largest things that are not weights take turns on the device. A tensor stays the same object wherever its
numbers are, so that whoever holds it (an optimizer, a checkpoint) need not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["OffloadedTensors", "move_tensors"]


def move_tensors(tensors: Sequence[Tensor], to: torch.device) -> int:
    """Give these tensors memory on a device, with the same numbers in it; returns the bytes that were moved.

    From a GPU they go to memory that cannot be swapped out, which both directions are copied through at full speed.
    """
    num_bytes = 0
    for tensor in tensors:
        moved = torch.empty_like(tensor, device=to, pin_memory=to.type == "cpu" and tensor.device.type == "cuda")
        moved.copy_(tensor.detach())
        tensor.data = moved
        num_bytes += moved.nbytes
    return num_bytes


class OffloadedTensors:
    """Tensors that are on one device while they are worked with, and on another all other time."""

    def __init__(self, tensors: Sequence[Tensor], compute_device: torch.device, offload_device: torch.device) -> None:
        self._tensors, self._compute_device, self._offload_device = tensors, compute_device, offload_device
        self._users = 0
        move_tensors(tensors, offload_device)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Within, they are home. It may be nested; they leave with the last, also where that fails."""
        if not self._users:
            move_tensors(self._tensors, self._compute_device)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                move_tensors(self._tensors, self._offload_device)
