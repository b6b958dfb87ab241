"""The peak of this process's memory, and the size of the memory that it is taken from."""

from __future__ import annotations

import os
import resource
import sys
from functools import cache
from pathlib import Path

import torch

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
