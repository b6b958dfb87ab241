"""The process keeps memory that a computation frees, and few compiled kernels, unless the user chose otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import resource, torch
from etude.models import create, tiny_config
create(tiny_config(16, layers=1, hidden=8, heads=1, kv_heads=1), seed=0)
def faults():
    torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
first = [faults() for _ in range(3)][-1]
print([faults() for _ in range(5)][-1] - first)
"""
KERNELS = """
import ctypes, torch
from etude.models import create, tiny_config
create(tiny_config(16, layers=1, hidden=8, heads=1, kv_heads=1), seed=0)
class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field{n}", ctypes.c_size_t) for n in range(10)]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo
def used():
    return mallinfo2().field7
weight = torch.ones(640, 256, dtype=torch.bfloat16)
torch.ones(1, 256, dtype=torch.bfloat16) @ weight.T
before = used()
for rows in range(2, 400):
    torch.ones(rows, 256, dtype=torch.bfloat16) @ weight.T
print(used() - before)
"""
PAGES = 5 * 2**26 // os.sysconf("SC_PAGE_SIZE")
"""The pages of five tensors that are created and freed in turn."""


def number(program: str, **environment: str) -> int:
    """Return the number that a program prints. Its environment has no other settings of the allocator."""
    chosen = ("MALLOC_", "GLIBC_", "ONEDNN_", "LRU_")
    without_settings = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    command = [sys.executable, "-c", program]
    process = subprocess.run(
        command, env=without_settings | environment, capture_output=True, text=True, check=True, timeout=120
    )
    return int(process.stdout)


def faults(**environment: str) -> int:
    """Return the page faults of a process that creates and frees a tensor five times."""
    return number(PROGRAM, **environment)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_used_again() -> None:
    assert faults() < 0.05 * PAGES


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_users_settings_are_respected() -> None:
    assert faults(MALLOC_TRIM_THRESHOLD_="0") > 0.5 * PAGES


@pytest.mark.skipif(
    not (platform.libc_ver()[0] == "glibc" and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN compiles nothing for bf16 here, or another C library",
)
def test_a_run_keeps_few_of_the_kernels_of_its_shapes() -> None:
    few = number(KERNELS)
    all_kernels = number(KERNELS, ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024", LRU_CACHE_CAPACITY="1024")
    assert few < all_kernels / 4 and all_kernels > 2**26
