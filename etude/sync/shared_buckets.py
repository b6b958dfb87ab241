"""Two buckets of shared memory: the engines read one while the other is filled.

    consumes       a stream of tensors
    produces       buckets that any process of this machine can map by file name
    waits for      nothing: the caller waits for the readers before it fills a bucket again

Both buckets stay allocated between publishes, so a publish allocates nothing. A bucket grows if a single tensor is
larger. Closing removes the files; if the owner is killed, torch's manager process for shared files removes them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.sync.weights import ALIGNMENT, TensorMeta, WeightStream, dtype_name, gather_full_tensor

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """The location of a bucket's bytes, for another process."""

    manager: bytes
    """The socket of torch's manager of shared files, for readers that map the file through torch."""
    handle: bytes
    """The name that torch gives the file."""
    nbytes: int
    """The size of the bucket."""
    base: int
    """The offset of the bucket in the file: torch stores its reader count before it."""

    @property
    def path(self) -> str:
        """The path of the file, for readers that map it without torch's manager."""
        return str(SHARED_MEMORY / self.handle.decode().lstrip("/"))


class SharedBucket:
    """One bucket of shared memory."""

    def __init__(self, nbytes: int) -> None:
        self._storage: Any = None
        self._bytes: Tensor = torch.empty(0, dtype=torch.uint8)
        self._min_bytes = nbytes

    @property
    def capacity(self) -> int:
        """The size of the bucket in bytes."""
        return self._bytes.nbytes

    def fill(self, stream: WeightStream) -> list[TensorMeta]:
        """Write tensors end to end, cast to the published dtype, until the next does not fit or none is left.

        Return the name, dtype, shape and offset of each; an empty list at the end.
        """
        if not stream.next_nbytes():
            return []
        self._ensure_capacity(max(self._min_bytes, _round_up(stream.next_nbytes())))
        pieces: list[TensorMeta] = []
        end = 0
        while (following := stream.peek()) is not None and end + stream.next_nbytes() <= self.capacity:
            name, tensor, dtype = following
            piece = TensorMeta(name, dtype_name(dtype), tuple(tensor.shape), end)
            room = self._bytes[end : end + piece.nbytes].view(dtype).view(piece.shape)
            room.copy_(gather_full_tensor(tensor))
            stream.advance()
            pieces.append(piece)
            end = _round_up(end + piece.nbytes)
        return pieces

    def get_handle(self) -> SharedMemoryHandle:
        """Return the handle by which other processes map the bucket."""
        manager, handle, nbytes = self._storage._share_filename_cpu_()
        file = SHARED_MEMORY / handle.decode().lstrip("/")
        return SharedMemoryHandle(manager, handle, nbytes, file.stat().st_size - nbytes)

    def add_readers(self, readers: int) -> None:
        """Raise torch's reference count for readers to come; each lowers it once it has mapped the bucket."""
        for _ in range(readers):
            self._storage._shared_incref()

    def close(self) -> None:
        """Free the memory. Readers that mapped it through torch keep it; the last one removes the file."""
        self._storage, self._bytes = None, torch.empty(0, dtype=torch.uint8)

    def _ensure_capacity(self, nbytes: int) -> None:
        """Ensure a size of at least `nbytes`, in a new file if the old one is too small."""
        if self.capacity >= nbytes:
            return
        self.close()
        room = os.statvfs(SHARED_MEMORY)
        if room.f_bavail * room.f_frsize < nbytes:
            raise ConfigError(
                f"A bucket of {nbytes / 2**20:.0f} MiB does not fit into {SHARED_MEMORY}, which has "
                f"{room.f_bavail * room.f_frsize / 2**20:.0f} MiB free. Enlarge it (docker run --shm-size=…), make "
                f"`bucket_mib` smaller, or publish through files."
            )
        self._storage = torch.UntypedStorage._new_using_filename_cpu(nbytes)
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(self._storage)


class DoubleBuffer:
    """Two buckets, used in turn."""

    def __init__(self, nbytes: int) -> None:
        self._slots = (SharedBucket(nbytes), SharedBucket(nbytes))
        self._turn = 0

    @property
    def capacity(self) -> int:
        """The size of both buckets in bytes."""
        return sum(slot.capacity for slot in self._slots)

    def next(self) -> SharedBucket:
        """Return the bucket whose turn it is."""
        self._turn = 1 - self._turn
        return self._slots[self._turn]

    def close(self) -> None:
        """Free the memory of both."""
        for slot in self._slots:
            slot.close()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
