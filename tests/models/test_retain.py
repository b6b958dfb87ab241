"""What a computation frees stays with the process, unless somebody chose otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from etude.models import create, tiny
create(tiny(16, layers=1, hidden=8, heads=1, kv_heads=1), seed=0)
def faults():
    torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
first = [faults() for _ in range(3)][-1]
print([faults() for _ in range(5)][-1] - first)
"""
PAGES = 5 * 2**26 // os.sysconf("SC_PAGE_SIZE")
"""What five tensors take that come and go."""


def faults(**environment: str) -> int:
    """How many pages the kernel had to give a process in which a tensor came and went five times."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    program = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(program, env=plain | environment, capture_output=True, text=True, check=True, timeout=120)
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_was_freed_is_used_again() -> None:
    assert faults() < 0.05 * PAGES


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_whoever_chose_otherwise_is_not_overruled() -> None:
    assert faults(MALLOC_TRIM_THRESHOLD_="0") > 0.5 * PAGES
