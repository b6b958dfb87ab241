"""The memory of a device: its size, its peak, and tensors that leave it while they are unused.

    collecting    engine awake: keys and values      optimizer state in CPU memory
    updating      engine asleep                      optimizer state on the GPU

So the two largest users of memory besides weights take turns on the device. A move changes a tensor's storage and keeps
the tensor object, so that its holders (an optimizer, a checkpoint) need no update.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: on a GPU since the last reset, else since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@cache
def total_memory(device: torch.device) -> int:
    """Return the memory of the device in bytes; that of the processor is at most the limit of its cgroup.

    A GPU that a dry run only imagines counts as this machine's memory.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such file, or `max`
            continue
    return min(limits)


def move_tensors(tensors: Sequence[Tensor], to: torch.device) -> None:
    """Move the storage of these tensors to a device.

    From a GPU they go to pinned memory, which copies at full speed in both directions.
    """
    for tensor in tensors:
        moved = torch.empty_like(tensor, device=to, pin_memory=to.type == "cpu" and tensor.device.type == "cuda")
        moved.copy_(tensor.detach())
        tensor.data = moved


class OffloadedTensors:
    """Tensors that are on one device while they are in use, and on another at all other times."""

    def __init__(self, tensors: Sequence[Tensor], compute_device: torch.device, offload_device: torch.device) -> None:
        self._tensors = tensors
        self._compute_device = compute_device
        self._offload_device = offload_device
        self._users = 0
        move_tensors(tensors, offload_device)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Keep the tensors on the compute device within this context, which may be nested.

        They are offloaded again at the end of the outermost context, also if it fails.
        """
        if not self._users:
            move_tensors(self._tensors, self._compute_device)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                move_tensors(self._tensors, self._offload_device)
                if self._compute_device.type == "cuda":
                    torch.cuda.empty_cache()  # a server on this GPU gets only what torch does not keep
