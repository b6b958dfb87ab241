"""Publishing within one machine: through two buckets of shared memory, with no weights over a socket.

    trainer ──copy──► │ bucket 0 │ ──copy──► replica's own weights
                      │ bucket 1 │ is filled meanwhile, and then they swap

    waits for      nothing: the caller waits for the readers before it fills a bucket again

Both buckets stay allocated between publishes, so a publish allocates nothing. A bucket grows if a single tensor is
larger. Closing removes the files; if the owner is killed, torch's manager process for shared files removes them.

vLLM's plug-in maps the file. SGLang takes torch's handles, in the pickle that its endpoint for tensors expects.
That endpoint accepts only torch's own form of shared tensors, so this module writes that form without real tensors.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
from base64 import b64encode
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from etude.errors import ConfigError
from etude.sync.transport import Bucket, WeightReceiver, WeightTransport
from etude.sync.weights import TensorMeta, WeightStream, fill_bucket, round_up

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
        """Write the next tensors, and return their places; an empty list at the end."""
        if not stream.next_nbytes():
            return []
        self._ensure_capacity(max(self._min_bytes, round_up(stream.next_nbytes())))
        return fill_bucket(self._bytes, stream)

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
        self._storage = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

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


class ShmTransport(WeightTransport):
    """The transport to servers on this machine."""

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        self._slots = SharedBucket(bucket_bytes), SharedBucket(bucket_bytes)
        self._turns = cycle(self._slots)
        self._dtype = dtype

    @property
    def held_bytes(self) -> int:
        """The bytes that it holds, between publishes and during one: both buckets."""
        return sum(slot.capacity for slot in self._slots)

    async def buckets(self, weights: Iterable[tuple[str, Tensor]], _whole: bool, /) -> AsyncGenerator[Bucket, None]:
        """Yield the weights as buckets, which are filled alternately."""
        stream = WeightStream(weights, self._dtype)
        for slot in self._turns:
            pieces = await asyncio.to_thread(slot.fill, stream)
            if not pieces:
                return
            place = slot.get_handle()
            where = {"path": place.path, "base": place.base, "nbytes": place.nbytes}
            yield Bucket("shm", tuple(pieces), where, tensor_handles=partial(_pickle_handles, slot, place, pieces))

    def close(self) -> None:
        for slot in self._slots:
            slot.close()


def _pickle_handles(
    slot: SharedBucket, handle: SharedMemoryHandle, pieces: Sequence[TensorMeta], server: WeightReceiver
) -> str:
    """Pickle the pieces as torch passes shared tensors, in base 64; each rank of the server maps the bucket once."""
    slot.add_readers(server.ranks)
    storage = _StorageStub(handle)
    pickled = io.BytesIO()
    _SharedTensorPickler(pickled).dump([(piece.name, _TensorStub(storage, piece)) for piece in pieces])
    return b64encode(pickled.getvalue()).decode()


@dataclass(frozen=True, eq=False)
class _StorageStub:
    """A stub for the bucket's storage."""

    handle: SharedMemoryHandle


@dataclass(frozen=True, eq=False)
class _TypedStorageStub:
    """A stub for the storage, read as one dtype."""

    storage: _StorageStub
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _TensorStub:
    """A stub for a tensor in the storage."""

    storage: _StorageStub
    piece: TensorMeta


class _SharedTensorPickler(pickle.Pickler):
    """A pickler that writes each stub as torch writes the shared tensor or storage itself."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the function and the arguments that rebuild the object where it is read."""
        if isinstance(obj, _StorageStub):
            place = obj.handle
            made = (torch.UntypedStorage, place.manager, place.handle, place.nbytes)
            return reductions.rebuild_storage_filename, made
        if isinstance(obj, _TypedStorageStub):
            return reductions.rebuild_typed_storage, (obj.storage, obj.dtype)
        if isinstance(obj, _TensorStub):
            piece = obj.piece
            dtype: torch.dtype = getattr(torch, piece.dtype)
            strides = tuple(prod(piece.shape[at + 1 :]) for at in range(len(piece.shape)))
            laid = (piece.offset // dtype.itemsize, torch.Size(piece.shape), strides, False)
            return reductions.rebuild_tensor, (torch.Tensor, _TypedStorageStub(obj.storage, dtype), laid)
        return NotImplemented
