"""Bytes in the controller's memory are read by other processes, and freed with their last handle."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from etude.dispatch.shared_bytes import BLOCK_BYTES, SharedBytes, SharedMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bytes are sent where the system cannot share them")

READ = """
import pickle, sys
for handle in pickle.load(sys.stdin.buffer):
    sys.stdout.buffer.write(handle.read())
"""


def open_files() -> int:
    """Return how many file descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_another_process_reads_what_a_handle_names() -> None:
    memory = SharedMemory()
    handles = [memory.put(os.urandom(1) * size) for size in (5_000, 4_096, 70_000)]
    sent = pickle.dumps(handles)
    assert all(isinstance(handle, SharedBytes) for handle in handles) and len(sent) < 500
    read = subprocess.run([sys.executable, "-c", READ], input=sent, capture_output=True, check=True).stdout
    assert len(read) == 79_096 and read == b"".join(
        handle.read() for handle in handles if not isinstance(handle, bytes)
    )
    assert memory.put(b"few bytes") == b"few bytes"


def test_memory_is_freed_with_the_last_handle() -> None:
    """A handle that came back from a rank keeps it too."""
    before = open_files()
    memory = SharedMemory()
    handles = [memory.put(bytes([place]) * 5_000) for place in range(3)]
    assert open_files() == before + 1
    back = pickle.loads(pickle.dumps(handles[1]))
    del memory, handles
    gc.collect()
    assert back.read() == bytes([1]) * 5_000 and open_files() == before + 1
    del back
    gc.collect()
    assert open_files() == before


def test_blocks_have_a_bounded_size() -> None:
    before = open_files()
    memory = SharedMemory()
    handles = [memory.put(bytes(BLOCK_BYTES // 2 + 1)) for _ in range(2)]
    assert open_files() == before + 2 and all(isinstance(handle, SharedBytes) for handle in handles)
