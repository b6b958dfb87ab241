"""What a process keeps where the processor computes: the memory that a computation gives back, and few kernels.

glibc hands large tensors back to the system as soon as they are freed, and asks for them anew a moment later: each page
comes back empty, and is filled with zeros by the kernel, before anything is written to it. A training step frees and
takes gigabytes. Measured on two cores, a step of a model with 75 million parameters takes a third less time when what
was freed stays with the process, for the next tensor of that size.

oneDNN compiles a kernel for each shape of matrices in bf16, and keeps the last thousand, of half a megabyte each; torch
keeps as many again. Packed sequences hardly ever come in the same shape twice, so a run would grow by a gigabyte, and
find none of them again. A few dozen hold the shapes of one forward and backward pass, whose layers do share them.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

from etude.config.env import is_allocator_configured, limit_kernel_caches

__all__ = ["retain_memory"]

KERNELS = 32
"""How many kernels are kept."""

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Which settings glibc's `mallopt` changes: how much may lie free before it is given back, and how many tensors may
have a mapping of their own, which is given back with them."""


@cache
def retain_memory() -> bool:
    """Have this process keep what it frees, and few kernels; true if it keeps what it frees. Left alone where the C
    library is not glibc, and where the environment says otherwise."""
    limit_kernel_caches(KERNELS)
    if platform.libc_ver()[0] != "glibc" or is_allocator_configured():
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(TRIM_THRESHOLD, -1) and library.mallopt(MMAP_MAX, 0))
