"""Bytes that the ranks of this machine read from the controller's memory, so that they are not sent to each rank.

    controller   put(content) ──► SharedBytes, sent in place of the content ──► rank   read() ──► content

The memory is in files without a name, of which only this process holds descriptors. So nothing is left of it however
the process ends. A rank opens such a file under `/proc`.
"""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import Any

BLOCK_BYTES = 64 * 2**20
"""The bytes of a block of memory, each of which takes one file descriptor."""
MIN_SHARED_BYTES = 4096
"""The size from which bytes are shared. Fewer are sent."""


class SharedMemory:
    """Memory of this process, in blocks. A block is freed once no handle to its bytes is left."""

    def __init__(self) -> None:
        self._block: _Block | None = None

    def put(self, content: bytes) -> bytes | SharedBytes:
        """Return a handle to a copy of these bytes; the bytes where they are few, or the system cannot share them."""
        if len(content) < MIN_SHARED_BYTES or sys.platform != "linux":
            return content
        block = self._block
        if block is None or block.size + len(content) > BLOCK_BYTES:
            block = self._block = _Block()
        start = block.append(content)
        return SharedBytes(os.getpid(), block.descriptor, start, len(content), block)


class _Block:
    """A file in memory. It is closed when this object is collected."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("etude-images")
        self.size = 0
        _blocks[self.descriptor] = self
        weakref.finalize(self, os.close, self.descriptor)

    def append(self, content: bytes) -> int:
        """Write bytes at the end, and return where they begin."""
        start = self.size
        view = memoryview(content)
        while view:
            written = os.pwrite(self.descriptor, view, self.size)
            self.size += written
            view = view[written:]
        return start


_blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
"""The blocks of this process, by their descriptors."""


class SharedBytes:
    """A handle to bytes in the memory of the process that made it."""

    def __init__(self, pid: int, descriptor: int, start: int, size: int, block: _Block | None) -> None:
        """block: holds the memory, in the process that made it."""
        self._place = (pid, descriptor, start, size)
        self._block = block

    def read(self) -> bytes:
        """Return the bytes."""
        pid, descriptor, start, size = self._place
        if self._block is not None:
            return os.pread(descriptor, size, start)
        with Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file:
            file.seek(start)
            return file.read(size)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_shared, self._place


def _open_shared(pid: int, descriptor: int, start: int, size: int) -> SharedBytes:
    """Return a handle that came from another process. One that comes back to its own holds the memory again."""
    block = _blocks.get(descriptor) if pid == os.getpid() else None
    return SharedBytes(pid, descriptor, start, size, block)
