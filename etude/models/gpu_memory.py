"""The memory of a GPU, or of the GPU that a dry run imagines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

_planned_gpu = ContextVar[int | None]("planned_gpu", default=None)


@contextmanager
def planned_gpu(total: int | None) -> Iterator[None]:
    """Compute as on a GPU of `total` bytes, all of them free, while a dry run imagines one."""
    token = _planned_gpu.set(total)
    try:
        yield
    finally:
        _planned_gpu.reset(token)


def gpu_bytes(device: torch.device) -> int:
    """Return the total bytes of a GPU; 0 where they are not known."""
    planned = _planned_gpu.get()
    if planned is not None or not torch.cuda.is_available():
        return planned or 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Return the total bytes of a GPU, and those that are free or kept by torch; zeros where they are not known."""
    planned = _planned_gpu.get()
    return _real_memory(device) if planned is None else (planned, planned)


@cache
def _real_memory(device: torch.device) -> tuple[int, int]:
    """They are read once, so that all passes of a process have the same chunks, and none waits for the driver."""
    if not torch.cuda.is_available():  # a dry run imagines the GPU
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return total, free + kept
