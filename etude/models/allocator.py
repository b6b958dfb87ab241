"""Memory settings of a process that computes on the CPU: it keeps freed memory, and caches few kernels.

glibc returns the memory of a large tensor to the operating system as soon as it is freed, and requests memory again for
the next tensor. The system then fills each new page with zeros before the first write. A training step frees and
allocates gigabytes. If the process keeps freed memory for the next tensor of that size, a step takes a third less time.
This was measured on two cores, with a model of 75 million parameters.

oneDNN compiles a kernel for each shape of matrices in bf16. It caches the last thousand, of half a megabyte each; torch
caches as many besides. Packed sequences hardly ever have the same shape twice. So a run would grow by a gigabyte, and
never reuse the kernels. A cache of a few dozen holds the shapes of one forward and backward pass, whose layers do share
kernels.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

from etude.config.env import is_allocator_configured, limit_kernel_caches

KERNELS = 32
"""The number of kernels that each cache holds."""

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""The settings of glibc's `mallopt` to change.

One is the amount of free memory above which glibc returns memory to the system. The other is the number of tensors that
may have a separate mapping, which is returned when its tensor is freed."""


@cache
def retain_memory() -> bool:
    """Make this process keep freed memory and cache few kernels; return true if it keeps freed memory.

    The allocator stays as it is if the C library is not glibc, or if the environment configures it.
    """
    limit_kernel_caches(KERNELS)
    if platform.libc_ver()[0] != "glibc" or is_allocator_configured():
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(TRIM_THRESHOLD, -1) and library.mallopt(MMAP_MAX, 0))
