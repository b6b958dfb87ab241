"""Two buckets of shared memory: one is read by the engines while the other is filled.

    consumes       a stream of tensors
    produces       buckets that any process of this machine may map by the name of their file
    waits for      nothing: whoever fills a slot again has waited for those who read it

Both are held for as long as weights are published, so a publish allocates nothing. A slot grows where a single tensor
is larger than it. The files go when their holder closes them, and, should it be killed, by the small manager process
that torch keeps for its shared files.
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

__all__ = ["DoubleBuffer", "SharedBucket", "SharedMemoryHandle"]

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class SharedMemoryHandle:
    """Where another process finds a slot's bytes."""

    manager: bytes
    """The socket of torch's manager of shared files, for who maps it through torch."""
    handle: bytes
    """The name that torch gives the file."""
    nbytes: int
    """The size of the slot."""
    base: int
    """Where in the file it begins: torch keeps a count of its readers before it."""

    @property
    def path(self) -> str:
        """The file, for who maps it without torch's manager."""
        return str(SHARED_MEMORY / self.handle.decode().lstrip("/"))


class SharedBucket:
    """One bucket."""

    def __init__(self, nbytes: int) -> None:
        self._storage: Any = None
        self._bytes: Tensor = torch.empty(0, dtype=torch.uint8)
        self._min_bytes = nbytes

    @property
    def capacity(self) -> int:
        """How many bytes it has."""
        return self._bytes.nbytes

    def fill(self, stream: WeightStream) -> list[TensorMeta]:
        """Write tensors end to end, cast to the dtype that they travel in, until the next no longer fits or all are
        written; returns what lies where, and nothing at the end."""
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
        """Where others find it."""
        manager, handle, nbytes = self._storage._share_filename_cpu_()
        file = SHARED_MEMORY / handle.decode().lstrip("/")
        return SharedMemoryHandle(manager, handle, nbytes, file.stat().st_size - nbytes)

    def add_readers(self, readers: int) -> None:
        """Count readers that will map it through torch: each takes itself off the count when it has mapped it."""
        for _ in range(readers):
            self._storage._shared_incref()

    def close(self) -> None:
        """Give the memory back. Whoever has it mapped through torch keeps it, and the file goes with the last."""
        self._storage, self._bytes = None, torch.empty(0, dtype=torch.uint8)

    def _ensure_capacity(self, nbytes: int) -> None:
        """Have at least so many bytes, in a new file where the old one is too small."""
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
    """The two of them, in turn."""

    def __init__(self, nbytes: int) -> None:
        self._slots = (SharedBucket(nbytes), SharedBucket(nbytes))
        self._turn = 0

    @property
    def capacity(self) -> int:
        """How many bytes both have."""
        return sum(slot.capacity for slot in self._slots)

    def next(self) -> SharedBucket:
        """The one whose turn it is."""
        self._turn = 1 - self._turn
        return self._slots[self._turn]

    def close(self) -> None:
        """Give the memory back."""
        for slot in self._slots:
            slot.close()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
