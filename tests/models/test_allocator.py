"""What a computation frees stays with the process, and few kernels do, unless somebody chose otherwise."""

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
class Told(ctypes.Structure):
    _fields_ = [(f"field{n}", ctypes.c_size_t) for n in range(10)]
told = ctypes.CDLL(None).mallinfo2
told.restype = Told
def used():
    return told().field7
weight = torch.ones(640, 256, dtype=torch.bfloat16)
torch.ones(1, 256, dtype=torch.bfloat16) @ weight.T
before = used()
for rows in range(2, 400):
    torch.ones(rows, 256, dtype=torch.bfloat16) @ weight.T
print(used() - before)
"""
PAGES = 5 * 2**26 // os.sysconf("SC_PAGE_SIZE")
"""What five tensors take that come and go."""


def number(program: str, **environment: str) -> int:
    """What a program prints, in an environment that chooses nothing of its own."""
    chosen = ("MALLOC_", "GLIBC_", "ONEDNN_", "LRU_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True, timeout=120)
    return int(ran.stdout)


def faults(**environment: str) -> int:
    """How many pages the kernel had to give a process in which a tensor came and went five times."""
    return number(PROGRAM, **environment)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_is_used_again() -> None:
    assert faults() < 0.05 * PAGES


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_whoever_chose_otherwise_is_not_overruled() -> None:
    assert faults(MALLOC_TRIM_THRESHOLD_="0") > 0.5 * PAGES


@pytest.mark.skipif(
    not (platform.libc_ver()[0] == "glibc" and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN compiles nothing for bf16 here, or another C library",
)
def test_a_run_keeps_few_of_the_kernels_that_its_shapes_ask_for() -> None:
    kept = number(KERNELS)
    everything = number(KERNELS, ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024", LRU_CACHE_CAPACITY="1024")
    assert kept < everything / 4 and everything > 2**26
